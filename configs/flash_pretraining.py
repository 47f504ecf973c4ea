"""DeepSeek-V4.1-Flash's pretraining with the numbers of its report, to be planned, and trained by who has the machines:

    python launch/plan.py --topology=v5p:8x8x8 --phase=train --config=configs/flash_pretraining.py

What the report does not give is a choice of this project: see docs/training.md.
"""

from ml_collections import ConfigDict

ROWS, LENGTH = 1536, 65_536  # 100.6 M tokens a step
TOKENS = 45e12


def get_config() -> ConfigDict:
    """The stage at 64 K tokens, up to 34 T; the stage at 1 M tokens has rows=96, length=1_048_576."""
    return ConfigDict(
        {
            "model": "fresh:configs/flash.py",
            "tokenizer": "tokenizer",
            "run": "runs/flash",
            "steps": int(TOKENS / (ROWS * LENGTH)),
            "numerics": "quantized_bf16",
            # FP4 main KV and the candidate restriction enter in post-training only.
            "unquantized": ["main_kv"],
            "candidates": False,
            "index_loss": "selected",
            "accumulate": 3,  # rows of each of 512 devices, one at a time
            "remat": "group",
            "rolled": True,
            "objective": {"balance_weight": 1e-4, "bias_speed": 1e-3},
            "optimizer": {
                "peak_rate": 2.6e-4,
                "final_rate": 2.6e-5,
                "warmup_steps": 2000,
                "schedule_unit": "tokens",
                "decay_start": 28e12,
                "decay_end": 40e12,
                "newton_schulz_dtype": "bfloat16",
            },
            "data": {
                "sources": [{"path": "data/text", "weight": 7.0}, {"path": "data/multimodal", "weight": 1.0}],
                "batch": ROWS,
                "length": LENGTH,
                "images_per_row": 8,
            },
            "checkpoint": {"every_steps": 250, "keep": 3},
        }
    )
