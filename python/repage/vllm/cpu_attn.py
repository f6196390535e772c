# SPDX-License-Identifier: Apache-2.0
"""CPU_ATTN on packed blocks.

The CPU kernels rearrange K and V inside a page, by the page's size, so reads and writes both go
through kernel pages and slot mappings are translated (``v1/attention/backends/cpu_attn.py``,
0.32.0 and 0.33.0). They read head-major interiors only.
"""

from __future__ import annotations

from repage import KernelPageRules
from repage.vllm import compat, cpu_zeroing
from repage.vllm.factory import repage_backend
from repage.vllm.policy import BackendPolicy, PageContext
from repage.vllm.settings import Settings

# CPUAttentionBackend.get_supported_kernel_block_sizes: [MultipleOf(32)].
_PAGE_MULTIPLE = 32


class CPUAttentionPolicy(BackendPolicy):
    """Pages of CPU_ATTN: the largest multiple of 32 up to ``REPAGE_CPU_PAGE`` that divides N."""

    name = "CPU_ATTN"
    writes_kernel_pages = True

    def page_rules(self, context: PageContext) -> KernelPageRules:  # noqa: ARG002
        """Return multiples of 32 tokens, capped by the environment.

        Parameters
        ----------
        context : PageContext
            Not looked at: the kernels take such pages of any cache.

        Returns
        -------
        repage.KernelPageRules
            Without a cap every manager block is a page itself. The kernels add up addresses in 64
            bits and load unaligned, so strides are free and pages may overlap.
        """
        return KernelPageRules(
            name=self.name,
            multiple_of=_PAGE_MULTIPLE,
            max_page_tokens=Settings.from_env().cpu_page,
            stride_alignment=1,
            base_alignment=1,
            max_stride_bytes=2**63 - 1,
        )

    def supported_layouts(self, native: tuple[str, ...] | None) -> tuple[str, ...] | None:
        """Add BLHNC, the packed layout with the interior of CPU_ATTN's own LBHNC.

        Parameters
        ----------
        native : tuple of str or None
            ``("LBHNC",)`` in vLLM 0.32.0 and 0.33.0.

        Returns
        -------
        tuple of str or None
            The parent's layouts stay preferred.
        """
        if native is None or "LBHNC" not in native or "BLHNC" in native:
            return native
        return (*native, "BLHNC")

    def on_builder_created(self) -> None:
        """Repair the V1 CPU runner's zeroing of new blocks, in the worker that runs it."""
        cpu_zeroing.install()


RepagedCPUAttentionBackend = repage_backend(
    compat.cpu_attention_backend(), CPUAttentionPolicy(), module=__name__
)
