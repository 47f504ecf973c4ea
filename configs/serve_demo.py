"""A server of the built-in demo model on a CPU: `python launch/serve.py --config=configs/serve_demo.py`."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """16 requests at once, each as long as the demo's 8,192 positions; a decode step takes 8 of them.

    MB of 10^6 bytes:

        page pools  11.3   16 rows x 64 pages x 128 tokens x 86 bytes
        windows      0.9   16 rows x 56,224 bytes
    """
    return ConfigDict({"model": "demo", "rows": 16, "max_len": 8192, "decode_rows": 8, "default_max_tokens": 512})
