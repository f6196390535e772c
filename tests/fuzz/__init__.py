# SPDX-License-Identifier: Apache-2.0
"""Random inputs against brute force, reproducible by seed.

``python -m fuzz`` in ``tests/`` (or ``make fuzz``) runs for minutes; short versions run with the
tests. Three targets: ``ops`` (the Python operations), ``sanitizer`` (their CPU twins, built with
AddressSanitizer and UBSan, in a process of its own) and ``engine`` (random traffic on a stock and a
packed vLLM engine).
"""
