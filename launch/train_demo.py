"""Trains the demo model: backbone, then the drafter on the frozen backbone, then export in the released format.

    python launch/train_demo.py --data demo_data --run demo_run --out demo_model

Rerunning the same command goes on where it stopped, also after a kill. `launch/demo_data.py` makes the data.
"""

import argparse
import json
import shutil
from pathlib import Path

import jax
import numpy as np

from dsv41_jax import compile_cache, numerics
from dsv41_jax.checkpoint.released import save_released
from dsv41_jax.config import load_config
from dsv41_jax.token_map import load_token_map
from dsv41_jax.training.checkpoint import Checkpoints
from dsv41_jax.training.data import Windows
from dsv41_jax.training.demo_optimizer import learning_rate, make_optimizer
from dsv41_jax.training.evaluate import bits_per_byte, held_out_nats
from dsv41_jax.training.init import init_params
from dsv41_jax.training.loop import Log, run_stage
from dsv41_jax.training.step import backbone_step, drafter_step, new_state

CONFIG = Path(__file__).parents[1] / "configs/demo.py"
EVALUATION_ROWS = 32


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder that launch/demo_data.py wrote")
    parser.add_argument("--run", required=True, help="folder for checkpoints and the log")
    parser.add_argument("--out", required=True, help="folder for the finished model; must not hold one yet")
    parser.add_argument("--steps", type=int, default=950, help="steps of the backbone")
    parser.add_argument("--draft-steps", type=int, default=900, help="steps of the drafter")
    parser.add_argument("--batch", type=int, default=8, help="windows of a batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a window")
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate of the backbone")
    parser.add_argument("--draft-peak", type=float, default=4e-3, help="highest learning rate of the drafter")
    parser.add_argument(
        "--quantized-from", type=float, default=0.6, help="share of the steps that run unquantised first"
    )
    parser.add_argument("--decay-from", type=float, default=0.6, help="share of the steps before the rate falls")
    parser.add_argument("--bias-speed", type=float, default=0.01, help="how far a router bias moves in a step")
    parser.add_argument("--anchors", type=int, default=24, help="draft rounds of each window")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters, order and anchors")
    return parser.parse_args(argv)


def train(flags: argparse.Namespace) -> dict:
    """All stages; returns the parameters."""
    data, run = Path(flags.data), Path(flags.run)
    run.mkdir(parents=True, exist_ok=True)
    config = load_config(CONFIG)
    token_map = load_token_map(data)
    log = Log(run / "train_log.jsonl")

    def windows(name: str, seed: int) -> Windows:
        tokens = np.load(data / f"{name}.npy")
        return Windows(tokens, config, token_map, flags.batch, flags.length, seed)

    train_windows, held_out = windows("train", flags.seed), windows("heldout", flags.seed)
    facts = json.loads((data / "data.json").read_text())["heldout"]
    bytes_per_token = facts["bytes"] / (facts["tokens"] - facts["blocks"])
    params = jax.jit(lambda key: init_params(config, key))(jax.random.key(flags.seed))
    drafter = {"mtp": params.pop("mtp")}
    quantized_from = int(flags.quantized_from * flags.steps)

    def numerics_at(step: int) -> numerics.Numerics:
        return numerics.QUANTIZED_TRAINING if step >= quantized_from else numerics.FLOAT32

    def evaluate(state, step: int) -> dict:
        used = numerics_at(step)
        nats, count = held_out_nats(config, used, state.params, held_out, EVALUATION_ROWS)
        return {"held_out_bits_per_byte": bits_per_byte(nats, count * bytes_per_token), "numerics": used.name}

    schedule = learning_rate(flags.peak, flags.steps, min(60, flags.steps // 4), int(flags.decay_from * flags.steps))
    optimizer = make_optimizer(schedule)
    steps = {
        n: backbone_step(config, n, optimizer, flags.bias_speed)
        for n in (numerics.FLOAT32, numerics.QUANTIZED_TRAINING)
    }
    state = run_stage(
        "backbone",
        new_state(params, optimizer, flags.seed),
        flags.steps,
        lambda step: steps[numerics_at(step)],
        lambda step: train_windows(step).arrays(),
        Checkpoints(run / "backbone"),
        log,
        schedule,
        evaluate,
    )
    backbone = state.params

    schedule = learning_rate(
        flags.draft_peak, flags.draft_steps, min(40, flags.draft_steps // 4), flags.draft_steps // 2
    )
    optimizer = make_optimizer(schedule)
    draft_windows = windows("train", flags.seed + 1)
    step_function = drafter_step(config, numerics.QUANTIZED_TRAINING, optimizer, flags.anchors)
    state = run_stage(
        "drafter",
        new_state(drafter, optimizer, flags.seed + 1),
        flags.draft_steps,
        lambda step: lambda state, batch: step_function(state, backbone, batch),
        lambda step: draft_windows(step).arrays(),
        Checkpoints(run / "drafter"),
        log,
        schedule,
    )
    return {**backbone, **state.params}


def main(argv: list[str] | None = None) -> None:
    """Train, or go on after an interruption, and write the model; `argv` as on the command line."""
    flags = parse(argv)
    compile_cache.enable()
    params = train(flags)
    config = load_config(CONFIG)
    save_released(params, config, flags.out, tokenizer=flags.data)
    shutil.copyfile(Path(flags.run) / "train_log.jsonl", Path(flags.out) / "train_log.jsonl")
    size = sum(file.stat().st_size for file in Path(flags.out).iterdir())
    tokens = flags.steps * flags.batch * flags.length
    print(f"{flags.out}: {size / 2**20:.2f} MiB, {tokens:,} tokens of training")


if __name__ == "__main__":
    main()
