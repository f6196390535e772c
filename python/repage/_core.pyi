from enum import IntEnum
from typing import Any, Final

class PageMapStatus(IntEnum):
    OK = ...
    NON_POSITIVE_SIZE = ...
    NEGATIVE_STRIDE = ...
    TOO_MANY_TOKENS = ...
    PAGE_DOES_NOT_DIVIDE = ...
    ADDRESS_OVERFLOW = ...

class Interior(IntEnum):
    NHC = ...
    HNC = ...
    HLNC = ...

class PageMap:
    @property
    def block_step(self) -> int: ...
    @property
    def page_step(self) -> int: ...
    @property
    def page_stride(self) -> int: ...
    @property
    def num_virtual_pages(self) -> int: ...
    def page_id(self, block: int, index: int) -> int: ...
    def max_page_id(self) -> int: ...
    def locate_token(self, token: int) -> tuple[int, int, int]: ...
    def virtual_slot(self, slot: int) -> int: ...
    def to_bytes(self) -> bytes: ...

class BlockGeometry:
    def __init__(
        self,
        num_blocks: int,
        block_tokens: int,
        num_heads: int,
        content_bytes: int,
        block_stride: int,
        head_stride: int,
        token_stride: int,
    ) -> None: ...
    @staticmethod
    def dense(
        interior: Interior,
        num_blocks: int,
        block_tokens: int,
        num_heads: int,
        content_bytes: int,
        block_stride: int,
        layers_in_block: int,
    ) -> BlockGeometry: ...
    @property
    def head_stride(self) -> int: ...
    @property
    def token_stride(self) -> int: ...
    def extent_bytes(self) -> int: ...
    def check(self, page_tokens: int) -> PageMapStatus: ...
    def page_map(self, page_tokens: int) -> PageMap: ...

class TableBuilder:
    def __init__(
        self,
        page_map: PageMap,
        page_table: int,
        watermarks: int,
        max_rows: int,
        block_columns: int,
        lookahead: int,
        row_parts: int,
        device: int,
        tensor_type: type[Any],
        /,
    ) -> None: ...
    # The rows; -1, and nothing done, for tensors of another type or that do not fit.
    def build(
        self,
        block_table: Any,
        seq_lens: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        /,
    ) -> int: ...
    def build_list(self, block_table: Any, kv_indptr: Any, kv_indices: Any, /) -> int: ...
    def launch(
        self,
        block_table: int,
        block_table_row_stride: int,
        seq_lens: int,
        kv_indptr: int,
        kv_indices: int,
        kv_indices_size: int,
        num_rows: int,
        stream: int,
        /,
    ) -> None: ...

COMPILER: Final[str]
CUDA_ARCHITECTURES: Final[str]
CUDA_VERSION: Final[int | None]

def row_parts(rows: int, columns: int, device: int, /) -> int: ...
def build_page_table(
    page_map: PageMap,
    block_table: int,
    block_table_row_stride: int,
    seq_lens: int,
    page_table: int,
    watermarks: int,
    num_rows: int,
    table_rows: int,
    block_columns: int,
    lookahead: int,
    row_parts: int,
    device: int,
    stream: int,
    /,
) -> None: ...
def build_kv_indices(
    page_map: PageMap,
    block_table: int,
    block_table_row_stride: int,
    kv_indptr: int,
    kv_indices: int,
    kv_indices_size: int,
    num_rows: int,
    block_columns: int,
    row_parts: int,
    device: int,
    stream: int,
    /,
) -> None: ...
def build_group_tables(
    page_map: PageMap,
    block_table: int,
    block_table_row_stride: int,
    seq_lens: int,
    page_table: int,
    watermarks: int,
    kv_indptr: int,
    kv_indices: int,
    kv_indices_size: int,
    num_rows: int,
    table_rows: int,
    block_columns: int,
    lookahead: int,
    row_parts: int,
    device: int,
    stream: int,
    /,
) -> None: ...
def map_slots(
    page_map: PageMap,
    slot_mapping: int,
    virtual_slots: int,
    num_slots: int,
    device: int,
    stream: int,
    /,
) -> None: ...
def last_page_len(
    page_tokens: int,
    seq_lens: int,
    last_page_len: int,
    num_rows: int,
    device: int,
    stream: int,
    /,
) -> None: ...

# Only in builds with CUDA.
def nvtx_register(name: str, /) -> int: ...
def nvtx_push(name: int, /) -> None: ...
def nvtx_pop() -> None: ...
