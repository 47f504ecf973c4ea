"""A server of the released model on a TPU v6e slice of 16 chips (v6e-16, topology 4x4, 4 hosts)."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """64 requests at once, 4 a chip, of up to a million tokens. Engram tables are in the hosts' memory, 51 GB each.

    Mesh 2x1x8: with tensor 8 the dense matrices take the least memory of a chip (4x1x4: 1.31 GB more). Of a chip, in GB
    of 10^9 bytes; what tests/test_serve_configs.py computes, or has from the compiler:

        weights       20.89   experts in FP4, a 16th of them; no Engram tables
        page pools     8.40   73,728 pages x 128 tokens x 890 bytes
        windows        0.01   4 rows x 3,478,272 bytes: rings, compressor tails
        tables         0.00   page tables and floors
        largest step   0.91   scratch, inputs, program: 512 tokens of a row of each chip through all layers
        images         0.71   embeddings of a block, the vision tower's activations
        sampler        0.40   logits, bias, counts, sorted copies of 64 rows, on the first chip
        in all        31.32
        usable        33.55   what libtpu lets a program have; 4 % of it stay free

    The 64 rows can use 32,768 pages of a chip; the others are room for prefixes that are kept.
    """
    return ConfigDict(
        {
            "model": "/models/flash",
            "served_name": "deepseek-v4.1-flash",
            "mesh": "2x1x8",
            "engram": "host",
            "rows": 64,
            "max_len": 1_048_576,
            "pages": 16 * 73_728,
            "prefill_block": 512,
            "default_max_tokens": 32_768,  # it thinks before it answers
            "request_seconds": 3600.0,
        }
    )
