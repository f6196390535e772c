# SPDX-License-Identifier: Apache-2.0
"""The self-test on strict CPU stand-ins of the real kernels.

They bind every call to the real signatures, and refuse what the real kernels would misread.
"""

from __future__ import annotations

import pytest
import torch

from reference_kernels.context import KernelContext
from reference_kernels.flashinfer_native import wrappers_for
from reference_kernels.xqa import XqaDecode
from repage.selftest.target import AttentionKernels, Target


@pytest.fixture
def target() -> Target:
    """A CPU target that pretends to be a Hopper device with FlashInfer."""
    context = KernelContext((9, 0), provenance=None)
    decode, prefill = wrappers_for(context)
    kernels = AttentionKernels("stand-ins", decode, prefill, XqaDecode(context))
    return Target(torch.device("cpu"), (9, 0), kernels, quick=True)
