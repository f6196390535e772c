# SPDX-License-Identifier: Apache-2.0
"""Whether packing pays: one rule for the command line and for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from repage.planner.layout_plan import LayoutPlan

_MIB = 2**20


@dataclass(frozen=True)
class Decision:
    """Which kind of layout a model should get, and why.

    Parameters
    ----------
    verdict : str
        ``"packed"`` or ``"stock"``.
    layout : str
        Layout of the verdict.
    reasons : tuple of str
        Sentences, most important first.
    stock : LayoutPlan or None
        The best layer-compact layout; None where none can express the model.
    packed : LayoutPlan or None
        The best block-outermost layout; None where none was possible.
    """

    verdict: Literal["packed", "stock"]
    layout: str
    reasons: tuple[str, ...]
    stock: LayoutPlan | None
    packed: LayoutPlan | None

    def summary(self) -> str:
        """Return the decision in one line."""
        return f"{self.verdict} KV cache, layout {self.layout}: {'; '.join(self.reasons)}"

    def because(self, reason: str) -> Decision:
        """Return the same decision with one more reason."""
        return replace(self, reasons=(*self.reasons, reason))


def prefers_packed_kv_cache(
    stock: LayoutPlan | None,
    packed: Sequence[LayoutPlan],
    *,
    cannot_pack: Sequence[str] = (),
    default_layout: str = "LBNHC",
) -> Decision:
    """Decide between the layer-compact and the block-outermost layouts.

    Parameters
    ----------
    stock : LayoutPlan or None
        Under the best layer-compact layout, with the specs of such a run.
    packed : sequence of LayoutPlan
        Under each block-outermost layout that every backend reads, with the specs of such runs.
    cannot_pack : sequence of str
        Why blocks cannot stay whole: one sentence per backend that must split them, naming it.
    default_layout : str, default "LBNHC"
        Layout of a stock verdict without a plan.

    Returns
    -------
    Decision
        Packed when pages differ in size, every attention backend takes manager blocks whole, and
        packing pays: a request of maximum length needs no more bytes, and fewer bytes or groups.
    """
    layout = default_layout if stock is None else stock.layout
    best = best_packed(packed)
    if best is not None and not best.mixed_page_sizes:
        reason = "all layers have pages of one size, so there is nothing to pack"
        return Decision("stock", layout, (reason,), stock, best)
    inexpressible = "no layer-compact layout can express these page sizes"
    if cannot_pack:
        also = () if stock is not None else (inexpressible,)
        return Decision("stock", layout, (*cannot_pack, *also), stock, best)
    if best is None:
        reason = "no block-outermost layout is read by every attention backend"
        return Decision("stock", layout, (reason,), stock, None)
    if stock is None:
        return Decision("packed", best.layout, (inexpressible,), None, best)
    return _compare(stock, best)


def best_packed(plans: Sequence[LayoutPlan]) -> LayoutPlan | None:
    """Choose among block-outermost layouts.

    Parameters
    ----------
    plans : sequence of LayoutPlan
        Most preferred first.

    Returns
    -------
    LayoutPlan or None
        The one whose kernel pages all exist, then the one that costs a request least, then the
        one with the largest pages, then the first.
    """
    if not plans:
        return None
    return min(plans, key=_cost)


def _cost(plan: LayoutPlan) -> tuple[int, int, int]:
    missing = sum(page.page_tokens is None for page in plan.kernel_pages)
    return missing, plan.bytes_per_request, -sum(p.page_tokens or 0 for p in plan.kernel_pages)


def _compare(stock: LayoutPlan, packed: LayoutPlan) -> Decision:
    fewer_bytes = packed.bytes_per_request - stock.bytes_per_request
    groups = f"{packed.num_groups} groups instead of {stock.num_groups}"
    length = f"a request of {stock.max_model_len:,} tokens"
    costs = f"{_mib(packed.bytes_per_request)} packed, {_mib(stock.bytes_per_request)} stock"
    if fewer_bytes > 0:
        share = fewer_bytes / stock.bytes_per_request
        reason = f"packing would cost {share:.1%} of capacity: {length} needs {costs}"
        return Decision("stock", stock.layout, (reason, groups), stock, packed)
    if fewer_bytes == 0 and packed.num_groups >= stock.num_groups:
        reason = f"packing changes nothing: {length} needs {costs}"
        return Decision("stock", stock.layout, (reason, groups), stock, packed)
    gain = stock.bytes_per_request / packed.bytes_per_request - 1
    reason = f"{length} needs {costs} ({gain:.1%} more capacity)"
    return Decision("packed", packed.layout, (reason, groups), stock, packed)


def _mib(count: int) -> str:
    return f"{count / _MIB:,.1f} MiB"
