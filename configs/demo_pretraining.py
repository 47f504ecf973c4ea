"""Trains the demo model's backbone on two CPU cores; `configs/demo_drafter.py` comes after it.

Data: python launch/demo_data.py ... --out demo_data (dsv41_jax/demo_model/README.md has the whole recipe).
"""

from ml_collections import ConfigDict

STEPS = 1300


def get_config() -> ConfigDict:
    """The report's rules, with rates and lengths for a model of 9.7 M parameters."""
    return ConfigDict(
        {
            "model": "fresh:configs/demo.py",
            "tokenizer": "demo_data",
            "run": "runs/demo_backbone",
            "export": "runs/demo_backbone_model",
            "steps": STEPS,
            "quantize_from": int(0.6 * STEPS),
            "index_loss": "dense",
            "objective": {"bias_speed": 0.01},
            "optimizer": {
                "peak_rate": 4e-3,
                "final_rate": 1e-4,
                "warmup_steps": 60,
                "schedule_unit": "steps",
                "decay_start": int(0.45 * STEPS),
                "decay_end": STEPS,
                # Few steps: what is looked up by token moves faster than the report has it in a long run.
                "embedding_rate": 5.0,
                "table_rate": 10.0,
                "clip_norm": 1.0,
            },
            "data": {
                "sources": [{"path": "demo_data/train.npy"}],
                "batch": 8,
                "length": 256,
                "replay_probability": 0.2,
            },
            "evaluation": {"sources": [{"path": "demo_data/heldout.npy"}], "every_steps": 150},
            "checkpoint": {"every_steps": 150, "keep": 2},
        }
    )
