"""A server of the released model on a TPU v5p slice of 64 chips (topology 4x4x4, 16 hosts)."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """256 requests at once, 4 a chip, of up to a million tokens. Engram tables are on the devices.

    Mesh 8x1x8: every chip has rows of its own, and dense matrices are split as far as attention's head groups allow. Of
    a chip, in GB of 10^9 bytes; what tests/test_serve_configs.py computes, or has from the compiler:

        weights        10.09   experts in FP4, a 64th of them; a 64th of the Engram tables
        page pools     16.80   147,456 pages x 128 tokens x 890 bytes
        windows         0.01   4 rows x 3,478,272 bytes: rings, compressor tails
        tables          0.00   page tables and floors
        largest step    7.29   scratch, inputs, program: 512 tokens of a row of each chip through all layers
        images          0.71   embeddings of a block, the vision tower's activations
        sampler         1.59   logits, bias, counts, sorted copies of 256 rows, on the first chip
        in all         36.50
        usable        102.80   what libtpu lets a program have

    More pages would fit, but with 155,345 on a device the largest array has 2^31 elements, more than 32-bit offsets
    reach. The 256 rows can use 32,768 of a chip; the others are room for prefixes that are kept.
    """
    return ConfigDict(
        {
            "model": "/models/flash",
            "served_name": "deepseek-v4.1-flash",
            "mesh": "8x1x8",
            "rows": 256,
            "max_len": 1_048_576,
            "pages": 64 * 147_456,
            "prefill_block": 512,
            "default_max_tokens": 32_768,  # it thinks before it answers
            "request_seconds": 3600.0,
        }
    )
