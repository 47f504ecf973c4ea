"""The indexer's Mosaic kernels."""

from pallas_kernels.indexer.tpu_scores import scores

__all__ = ["scores"]
