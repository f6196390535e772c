# SPDX-License-Identifier: Apache-2.0
"""Other vLLMs, several processes, several engines, several threads."""
