# SPDX-License-Identifier: Apache-2.0
"""Everything that speaks against a page which a kernel and a geometry would allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from repage.vllm import compat
from repage.vllm.driver_check import driver_refusal
from repage.vllm.policy import refusal_reason

if TYPE_CHECKING:
    from repage.vllm.policy import BackendPolicy, PageChoice, PageContext


def page_refusal(policy: BackendPolicy, context: PageContext, choice: PageChoice) -> str | None:
    """Return why layers must not be read in a page, if so.

    The preference asks while it decides, the builders ask before vLLM allocates the cache.

    Parameters
    ----------
    policy : BackendPolicy
        Of the layers' backend.
    context : PageContext
        The cache, with config and layers.
    choice : PageChoice
        The page.

    Returns
    -------
    str or None
        A sentence for an error; None where nothing speaks against it.
    """
    reason = refusal_reason(policy, context.spec)
    if reason is not None:
        return reason
    reader = compat.reads_cache_itself(context.vllm_config, context.layer_names)
    if reader is not None:
        return (
            f"{policy.name}: {reader} reads its KV cache with the backend's block tables itself "
            "and would take page ids for blocks. Set VLLM_KV_CACHE_LAYOUT to a layer-compact "
            "layout (LBNHC or LBHNC)"
        )
    return driver_refusal(policy, context, choice)
