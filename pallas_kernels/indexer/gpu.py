"""The indexer's kernels on CUDA GPUs (Triton)."""

from pallas_kernels.indexer.gpu_scores import candidate_scores, scores
from pallas_kernels.indexer.gpu_select import candidate_blocks, select

__all__ = ["candidate_blocks", "candidate_scores", "scores", "select"]
