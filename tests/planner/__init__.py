# SPDX-License-Identifier: Apache-2.0
"""Tests of the planner and of the command line."""
