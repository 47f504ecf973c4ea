"""The sizes that the workloads are built from."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model, and how much of it a workload holds.

    Attributes:
        heads .. streams: of the model, in the words of its configuration.
        batch: rows of a step. many: rows of a large step. prefill: tokens of a prefill block.
        pages: of a row's sequence, for attention and cache writes. index_pages: for scoring.
        long_row: entries of one long row. layers: of the stacked window ring.
    """

    heads: int
    head_dim: int
    rope_dim: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    block: int
    topk_blocks: int
    hidden: int
    expert_hidden: int
    experts: int
    experts_per_token: int
    query_rank: int
    output_groups: int
    output_rank: int
    streams: int
    batch: int
    many: int
    prefill: int
    pages: int
    index_pages: int
    long_row: int
    layers: int


# 1,024 rows: 240,640 pages of 36 KiB of main KV (8.9 GB), and 983,040 pages of 8.5 KiB of index keys (8.6 GB).
RELEASED = Sizes(
    heads=64,
    head_dim=512,
    rope_dim=64,
    window=128,
    index_heads=32,
    index_dim=128,
    index_topk=512,
    block=8,
    topk_blocks=2048,
    hidden=5120,
    expert_hidden=2304,
    experts=384,
    experts_per_token=6,
    query_rank=1280,
    output_groups=8,
    output_rank=1024,
    streams=4,
    batch=64,
    many=1024,
    prefill=512,
    pages=235,
    index_pages=960,
    long_row=1 << 20,
    layers=40,
)
TINY = Sizes(
    heads=4,
    head_dim=64,
    rope_dim=16,
    window=32,
    index_heads=4,
    index_dim=64,
    index_topk=48,
    block=8,
    topk_blocks=20,
    hidden=256,
    expert_hidden=128,
    experts=8,
    experts_per_token=2,
    query_rank=128,
    output_groups=2,
    output_rank=64,
    streams=4,
    batch=2,
    many=3,
    prefill=16,
    pages=2,
    index_pages=3,
    long_row=1 << 11,
    layers=2,
)
