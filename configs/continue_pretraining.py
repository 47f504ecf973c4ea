"""Continues the pretraining of a released model; as it stands, of the demo model on text that launch/tokenize.py made:

    python launch/tokenize.py my_texts/ --out=my_data --tokenizer=dsv41_jax/demo_model --held_out=0.02
    python launch/train.py --config=configs/continue_pretraining.py --set data.sources="[{'path': 'my_data/train'}]"

For DeepSeek-V4.1-Flash on a pod: model="deepseek-ai/DeepSeek-V4.1-Flash", mesh="64x1x8", numerics="quantized_bf16",
remat="layer", rolled=True and rows of its length; `configs/flash_pretraining.py` has the report's numbers.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """A short run at a small rate, quantised as the release is, so that what is exported is what was trained."""
    return ConfigDict(
        {
            "model": "demo",
            "run": "runs/continued",
            "export": "runs/continued_model",
            "steps": 200,
            "numerics": "quantized",
            "optimizer": {
                "peak_rate": 3e-4,
                "final_rate": 3e-5,
                "warmup_steps": 20,
                "schedule_unit": "steps",
                "decay_start": 100,
                "decay_end": 200,
                "clip_norm": 1.0,
                "skip_spikes": True,
            },
            "data": {
                "sources": [{"path": "my_data/train"}],
                "batch": 8,
                "length": 256,
                "replay_probability": 0.2,
                "on_corrupt": "skip",
            },
            "evaluation": {"sources": [{"path": "my_data/heldout"}], "every_steps": 50},
            "checkpoint": {"every_steps": 50},
        }
    )
