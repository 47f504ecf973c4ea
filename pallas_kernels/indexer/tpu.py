"""The indexer's Mosaic kernels."""

from pallas_kernels.indexer.tpu_candidates import candidate_scores
from pallas_kernels.indexer.tpu_scores import scores
from pallas_kernels.indexer.tpu_select import candidate_blocks, select

__all__ = ["candidate_blocks", "candidate_scores", "scores", "select"]
