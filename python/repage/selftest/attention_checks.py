# SPDX-License-Identifier: Apache-2.0
"""Real attention kernels on virtual views of packed blocks, against the same on dense caches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from repage.selftest.attention import PATHS, attention_reference, make_queries
from repage.selftest.pool import PackedPool, PoolShape
from repage.selftest.result import Check, CheckFailedError, Finding, NotAvailableError, require

if TYPE_CHECKING:
    from repage.selftest.attention import AttentionPath, Queries
    from repage.selftest.pool import KernelPages, Layout
    from repage.selftest.target import Target

BLOCK_TOKENS = 640
LENGTHS = (1, 63, 64, 65, 640, 641, 1357)
HEADS = (1, 4)
HEAD_DIMS = (128, 256)
LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")

WINDOW = 300
"""Tokens that a windowed query sees; the first block of the longest sequence is freed."""

_SPECIAL_PAGE = 64
_FINITE_BYTE = 0x41  # 12.06 in bf16, 2.25 in fp8 e4m3


def attention_checks() -> list[Check]:
    """Return the checks of every path: plain, with overlapping pages, and with a window."""
    checks = []
    for path in PATHS:
        for layout in LAYOUTS:
            prefix = f"attention.{path.name}.{layout}"
            checks += [
                Check(
                    f"{prefix}.hd{head_dim}",
                    functools.partial(_check_pages, path=path, layout=layout, head_dim=head_dim),
                )
                for head_dim in HEAD_DIMS
            ]
            checks += [
                Check(
                    f"{prefix}.overlapping-pages",
                    functools.partial(_check_overlap, path=path, layout=layout),
                ),
                Check(
                    f"{prefix}.window",
                    functools.partial(_check_window, path=path, layout=layout),
                ),
            ]
    return checks


def compare(
    target: Target, path: AttentionPath, pool: PackedPool, page_tokens: int, queries: Queries
) -> float:
    """Run a path on the packed blocks and on dense pages.

    Parameters
    ----------
    target : Target
        Device and kernels.
    path : AttentionPath
        The kernel.
    pool : PackedPool
        Sequences in packed blocks.
    page_tokens : int
        Kernel page.
    queries : Queries
        From `make_queries` on the same pool.

    Returns
    -------
    float
        Largest absolute difference from plain torch.

    Raises
    ------
    CheckFailedError
        When the two differ in any bit, or from plain torch by more than the tolerance.
    """
    kernels = target.attention_kernels()
    window_left = -1 if pool.window is None else pool.window - 1

    def run(pages: KernelPages) -> torch.Tensor:
        try:
            return path.call(kernels, pages, queries, window_left)
        except kernels.missing_module_errors as error:
            raise NotAvailableError(f"kernel not built beforehand: {error}") from error

    packed = run(pool.virtual_pages(page_tokens))
    dense = run(pool.dense_pages(page_tokens))
    where = (
        f"pages of {page_tokens}, {pool.shape.kv_heads} KV heads, "
        f"page step {pool.plan(page_tokens).page_step}"
    )
    if not torch.equal(packed, dense):
        # A kernel that reads past its tokens does so on dense pages with the same tails too.
        poisoned = run(pool.dense_pages(page_tokens, poison=True))
        cause = (
            "; the same on dense pages with the same bytes in their tails: the kernel reads them"
            if _same_bits(packed, poisoned)
            else ""
        )
        raise CheckFailedError(f"{where}: {_describe(packed, dense)}{cause}")
    difference = (dense.float() - attention_reference(pool, queries)).abs().max().item()
    require(
        difference <= path.tolerance,
        f"{where}: {difference:.3g} away from plain torch, expected at most {path.tolerance}",
    )
    return float(difference)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _describe(packed: torch.Tensor, dense: torch.Tensor) -> str:
    wrong = (packed != dense).flatten(1).any(1)
    finite = torch.isfinite(packed).flatten(1).all(1)
    return (
        f"{int(wrong.sum())} of {len(wrong)} queries differ from the dense cache, "
        f"{int((~finite).sum())} are not finite"
    )


def _check_pages(target: Target, *, path: AttentionPath, layout: Layout, head_dim: int) -> Finding:
    """Compare all page sizes, with one and several KV heads."""
    path.require_device(target)
    target.attention_kernels()
    sizes = (_SPECIAL_PAGE,) if target.quick else path.page_sizes
    if path.takes_whole_blocks and not target.quick:
        sizes = (*sizes, BLOCK_TOKENS)
    combinations = _Combinations()
    for heads in HEADS[-1:] if target.quick else HEADS:
        shape = PoolShape(layout, heads, head_dim, path.cache_dtype, BLOCK_TOKENS)
        pool = PackedPool(shape, LENGTHS, target.device)
        queries = make_queries(pool, path.kind)
        for page_tokens in sizes:
            combinations.run(target, path, pool, page_tokens, queries)
    return combinations.finding(f"{len(HEADS)} head counts, pages {_text(sizes)}")


def _check_overlap(target: Target, *, path: AttentionPath, layout: Layout) -> Finding:
    """Use a block stride of an odd number of half pages, so that virtual pages overlap."""
    path.require_device(target)
    target.attention_kernels()
    heads, head_dim = HEADS[-1], HEAD_DIMS[-1]
    page_tokens = _SPECIAL_PAGE
    shape = PoolShape(layout, heads, head_dim, path.cache_dtype, BLOCK_TOKENS)
    token_stride = 2 * head_dim * shape.dtype.itemsize * (heads if layout == "NHD" else 1)
    slack = page_tokens * token_stride // 2
    shape = PoolShape(layout, heads, head_dim, path.cache_dtype, BLOCK_TOKENS, slack)
    pool = PackedPool(shape, LENGTHS, target.device)
    require(pool.plan(page_tokens).page_step == 2, "the geometry has no overlapping pages")
    combinations = _Combinations()
    combinations.run(target, path, pool, page_tokens, make_queries(pool, path.kind))
    return combinations.finding(f"page step 2, pages {page_tokens}")


def _check_window(target: Target, *, path: AttentionPath, layout: Layout) -> Finding:
    """Attend in a window, where freed blocks are the null block in the table."""
    path.require_device(target)
    target.attention_kernels()
    shape = PoolShape(layout, HEADS[-1], HEAD_DIMS[0], path.cache_dtype, BLOCK_TOKENS)
    # Some kernels read the null block and weigh it with zero, in stock layouts too: that is right
    # as long as it is finite, as vLLM keeps it. Whether NaN would do no harm is only reported.
    pool = PackedPool(shape, LENGTHS, target.device, window=WINDOW, null_byte=_FINITE_BYTE)
    require(int((pool.block_table[-1, :2] == 0).sum()) == 1, "no block was freed")
    queries = make_queries(pool, path.kind)
    combinations = _Combinations()
    combinations.run(target, path, pool, _SPECIAL_PAGE, queries)
    finding = combinations.finding(f"window {WINDOW}, null blocks, pages {_SPECIAL_PAGE}")
    poisoned = PackedPool(shape, LENGTHS, target.device, window=WINDOW)
    try:
        compare(target, path, poisoned, _SPECIAL_PAGE, queries)
    except CheckFailedError:
        reads = True
    else:
        reads = False
    text = "reads the null block" if reads else "never reads the null block"
    return Finding(
        f"{finding.detail}; {text}", {**finding.measurements, "reads_null_block": float(reads)}
    )


class _Combinations:
    """Counts what ran, what differed, and what had no kernel."""

    def __init__(self) -> None:
        self._differences: list[float] = []
        self._failures: list[str] = []
        self._missing: list[str] = []

    def run(
        self,
        target: Target,
        path: AttentionPath,
        pool: PackedPool,
        page_tokens: int,
        queries: Queries,
    ) -> None:
        """Compare one combination; the others are compared even if it fails."""
        try:
            self._differences.append(compare(target, path, pool, page_tokens, queries))
        except CheckFailedError as error:
            self._failures.append(str(error))
        except NotAvailableError as error:
            self._missing.append(f"pages {page_tokens}: {error}")

    def finding(self, what: str) -> Finding:
        """Return what was found, or raise what a check raises."""
        if self._failures:
            total = len(self._failures) + len(self._differences)
            raise CheckFailedError(
                f"{len(self._failures)} of {total} fail: {' | '.join(self._failures)}"
            )
        if not self._differences:
            raise NotAvailableError(self._missing[0])
        missing = f"; not available: {'; '.join(self._missing)}" if self._missing else ""
        worst = max(self._differences)
        return Finding(
            f"{len(self._differences)} bitwise equal to dense pages ({what}), at most {worst:.2g} "
            f"from plain torch{missing}",
            {"combinations": len(self._differences), "max_difference": worst},
        )


def _text(sizes: tuple[int, ...]) -> str:
    return "/".join(map(str, sizes))
