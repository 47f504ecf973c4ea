"""What a trained model shows: it overfits, images move what they should, and the demo's mechanisms carry their weight.

All of it takes minutes; the demo's own log is checked in the plain run.
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dsv41_jax import distributed
from dsv41_jax.checkpoint.names import flatten
from dsv41_jax.config import ModelConfig, load_config
from dsv41_jax.forward_options import ForwardOptions
from dsv41_jax.image_input import expand_placeholders
from dsv41_jax.image_plan import preprocess_image
from dsv41_jax.numerics import FLOAT32
from dsv41_jax.training import run as training
from dsv41_jax.training.init import init_params
from dsv41_jax.training.log import read_log
from dsv41_jax.training.objective import Losses, Objective
from dsv41_jax.training.optimizer_settings import OptimizerSettings
from dsv41_jax.training.records import Document, StoredImage
from dsv41_jax.training.schedule import Schedule
from dsv41_jax.training.state import trained_parts
from dsv41_jax.training.step import Trainer
from dsv41_jax.training.train_settings import TrainSettings
from training_data import maker, png, row_of

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.slow
def test_it_overfits_32_sequences(tmp_path):
    """The demo's architecture, quantised, to under 0.1 nats a token."""
    config = load_config(ROOT / "configs/demo.py")
    generator = np.random.default_rng(0)
    ids = generator.integers(8, config.vocab_size, (32, 63))
    np.save(tmp_path / "train.npy", np.insert(ids, 0, config.bos_token_id, axis=1).reshape(-1).astype(np.uint16))
    values = {
        "model": f"fresh:{ROOT / 'configs/demo.py'}",
        "tokenizer": str(ROOT / "dsv41_jax/demo_model"),
        "run": str(tmp_path / "run"),
        "steps": 80,
        "index_loss": "dense",
        "optimizer": {
            "peak_rate": 4e-3,
            "final_rate": 1e-4,
            "warmup_steps": 20,
            "schedule_unit": "steps",
            "decay_start": 40,
            "decay_end": 80,
            "embedding_rate": 5.0,
            "table_rate": 10.0,
            "clip_norm": 1.0,
        },
        "data": {"sources": [{"path": str(tmp_path / "train.npy")}], "batch": 8, "length": 256, "mixed_rows": 0},
        "tensorboard": False,
    }
    training.train(TrainSettings.of(values), distributed.here())
    lines = [line for line in read_log(tmp_path / "run" / "train_log.jsonl") if line["kind"] == "train"]
    print([(line["step"], round(line["nats"], 3)) for line in lines[::2]])
    assert lines[0]["nats"] > 4 and lines[-1]["nats"] < 0.1


@pytest.mark.slow
def test_a_step_with_images_trains_what_it_should():
    """The tower waits for the decay but for its last norm; projector, delimiters and the image bias move at once."""
    config = ModelConfig.from_json(GOLDEN / "tinyA_config.json")
    golden = load_file(GOLDEN / "tinyA_image.safetensors")
    encoded = [png(golden[f"image{i}.rgb"]) for i in range(2)]
    ids, inputs = expand_placeholders(golden["raw_ids"], [preprocess_image(e, config)[:2] for e in encoded], config)
    images = tuple(StoredImage(i.start, i.grid, e) for i, e in zip(inputs, encoded, strict=True))
    document = Document(ids, None, images)
    token_map = np.arange(config.vocab_size) % config.engram_compressed_vocab_size
    make = maker(config, token_map, length=len(ids) + 3, images_per_row=2, image_patches=130)
    batch = make([row_of((document, 0, len(ids)))], [0])

    settings = OptimizerSettings(warmup_steps=0, schedule_unit="steps", decay_start=1, decay_end=5, vision_rate=0.5)
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(0))
    losses = Losses(config, FLOAT32, ForwardOptions(index_loss="selected"), Objective(), "backbone")
    trainer = Trainer(losses, settings, Schedule.of(settings, 1), trained_parts(params, "backbone", images=True))
    step, state = trainer.step(), trainer.new_state(params, 0)
    states = [dict(flatten(jax.device_get(state.params)))]
    for _ in range(3):
        state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"]))
        states.append(dict(flatten(jax.device_get(state.params))))

    def moved(first: int, second: int) -> set[str]:
        return {".".join(p) for p in states[0] if np.any(states[first][p] != states[second][p])}

    before, after = moved(0, 1), moved(1, 3)
    at_once = {name for name in before if name.startswith(("vision", "aligner", "image_"))}
    assert "vision.norm.weight" in at_once and any(name.startswith("aligner") for name in at_once)
    assert not any(name.startswith(("vision.blocks", "vision.patch")) for name in before)
    assert any(name.startswith("vision.blocks") for name in after)
    assert {"layers.ffn.gate.bias", "layers.ffn.gate.bias_vl"} <= before


def test_the_demos_log_shows_it_learn():
    """Of the very run that made the model inside the package."""
    lines = read_log(ROOT / "dsv41_jax/demo_model/train_log.jsonl")
    steps = [line for line in lines if line["kind"] == "train" and "nats" in line]
    nats = [line["nats"] for line in steps]
    assert np.mean(nats[:3]) > 7 and np.mean(nats[-10:]) < 4.2
    assert all(line["dropped"] == 0 for line in steps)
    late = steps[len(steps) // 2 :]
    assert np.mean([line["load_mean"] for line in late]) < 1.5  # the mean over layers of max / mean load
    held_out = [line["nats"] for line in lines if line["kind"] == "evaluation"]
    assert held_out == sorted(held_out, reverse=True)
    last = [line for line in lines if line["kind"] == "evaluation"][-1]
    assert last["behind_prompt_ced"] == pytest.approx(last["behind_prompt_replay"], abs=0.02)
    assert last["behind_prompt_ced"] < last["behind_prompt_exact"] + 0.1
