"""Trains the demo model's drafter on the finished backbone of `configs/demo_pretraining.py`."""

from ml_collections import ConfigDict

STEPS = 1500


def get_config() -> ConfigDict:
    """DSpark's stage: the backbone is frozen, drafts begin at 24 random places of each row."""
    return ConfigDict(
        {
            "model": "runs/demo_backbone_model",
            "run": "runs/demo_drafter",
            "export": "runs/demo_model",
            "stage": "drafter",
            "steps": STEPS,
            "objective": {"anchors": 24, "bias_speed": 0.01},
            "optimizer": {
                "peak_rate": 4e-3,
                "final_rate": 5e-5,
                "warmup_steps": 40,
                "schedule_unit": "steps",
                "decay_start": STEPS // 2,
                "decay_end": STEPS,
                "embedding_rate": 5.0,
                "clip_norm": 1.0,
            },
            "data": {"sources": [{"path": "demo_data/train.npy"}], "batch": 8, "length": 256, "seed": 1},
            "checkpoint": {"every_steps": 150, "keep": 2},
        }
    )
