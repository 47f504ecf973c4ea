"""A server of the released model on one machine with 8 H200 GPUs."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """64 requests at once, 8 a GPU, of up to a million tokens. Engram tables are on the devices: they fit.

    Mesh 1x1x8: all GPUs of the machine are one tensor group, over NVLink. Of a GPU, in GB of 10^9 bytes; what
    tests/test_serve_configs.py computes, or has from the compiler:

        weights        64.86   experts in FP4, an 8th of them; an 8th of the Engram tables
        page pools     16.80   147,456 pages x 128 tokens x 890 bytes
        windows         0.03   8 rows x 3,478,272 bytes: rings, compressor tails
        tables          0.00   page tables and floors
        largest step    2.24   scratch, inputs, program: more than: 512 tokens of every row, encoder
        images          0.71   embeddings of a block, the vision tower's activations
        sampler         0.40   logits, bias, counts, sorted copies of 64 rows, on the first GPU
        in all         85.03
        usable        133.95   95 % of what is published

    More pages would fit, but with 155,345 on a device the largest array has 2^31 elements, more than 32-bit offsets
    reach. The 64 rows can use 65,536 of a GPU; the others are room for prefixes that are kept.
    """
    return ConfigDict(
        {
            "model": "/models/flash",
            "served_name": "deepseek-v4.1-flash",
            "mesh": "1x1x8",
            "rows": 64,
            "max_len": 1_048_576,
            "pages": 8 * 147_456,
            "prefill_block": 512,
            "default_max_tokens": 32_768,  # it thinks before it answers
            "request_seconds": 3600.0,
        }
    )
