# SPDX-License-Identifier: Apache-2.0
"""Tests on the real engine."""
