"""Measures the demo model on held-out text: bits per byte by numerics, accepted draft tokens, and a few samples.

    python launch/eval_demo.py --data demo_data

`launch/demo_data.py` makes the data. Takes some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import dsv41_jax as ds
from dsv41_jax import compile_cache, numerics
from dsv41_jax.token_map import compressed_token_map
from dsv41_jax.training.held_out import bits_per_byte, held_out_nats
from dsv41_jax.training.windows import Windows

PROMPTS = ("The Lord is", "In the beginning", "Verse 3. The Psalmist", "It is good for a man")


def held_out_bits(model: ds.Model, data: Path, rows: int | None = None) -> float:
    """Bits per byte of the held-out text in the model's own numerics; all of it, or about `rows` rows of 256 tokens."""
    tokens = np.load(data / "heldout.npy")
    facts = json.loads((data / "data.json").read_text(encoding="utf-8"))["heldout"]
    token_map = compressed_token_map(model.tokenizer.backend)
    windows = Windows(tokens, model.config, token_map, 8, 256, seed=0)
    nats, count = held_out_nats(model.config, numerics.named(model.numerics), model.params, windows, rows)
    return bits_per_byte(nats, count * facts["bytes"] / (facts["tokens"] - facts["blocks"]))


def accepted_drafts(model: ds.Model, contexts: np.ndarray, new_tokens: int) -> tuple[float, np.ndarray]:
    """Mean drafts accepted in a round at temperature 0, and the share of rounds that accept draft i, for each i.

    Args:
        contexts: int [B, T], the held-out texts to continue. new_tokens: how far.

    The text is decoded token by token and a draft is made at each; then rounds are walked as a server would: a round
    accepts the drafts up to the first that the model would not have chosen, and the model's own choice follows.
    """
    block = model.config.dspark_block_size
    logits, cache = model.prefill(contexts)
    chosen, drafted = [np.asarray(logits).argmax(-1)], []
    for _ in range(new_tokens + block):
        drafted.append(np.asarray(model.draft(cache, chosen[-1])[0])[:, 1:])
        logits, cache = model.decode(cache, chosen[-1])
        chosen.append(np.asarray(logits).argmax(-1))
    text, drafts = np.stack(chosen, axis=1), np.stack(drafted, axis=1)  # [B, n + block + 1], [B, n + block, block]
    lengths = []
    for row in range(len(contexts)):
        place = 0
        while place < new_tokens:
            agree = drafts[row, place] == text[row, place + 1 : place + 1 + block]
            accepted = int(np.argmin(agree)) if not agree.all() else block
            lengths.append(accepted)
            place += accepted + 1
    lengths = np.array(lengths)
    return float(lengths.mean()), np.array([(lengths > i).mean() for i in range(block)])


def held_out_contexts(data: Path, rows: int, length: int) -> np.ndarray:
    """int32 [rows, length], evenly spread over the held-out stream."""
    tokens = np.load(data / "heldout.npy").astype(np.int32)
    starts = np.linspace(0, len(tokens) - length - 1, rows).astype(int)
    return tokens[starts[:, None] + np.arange(length)]


def main(argv: list[str] | None = None) -> None:
    """Print bits per byte and accepted drafts; `argv` as on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='"demo" or a released-format folder (default: demo)')
    parser.add_argument("--data", required=True, help="folder that launch/demo_data.py wrote")
    parser.add_argument("--rows", type=int, default=None, help="held-out rows of 256 tokens to use (default: all)")
    flags = parser.parse_args(argv)
    compile_cache.enable()
    data = Path(flags.data)

    print("numerics   bits per byte")
    for name in ("float32", "released", "noquant"):
        print(f"{name:10} {held_out_bits(ds.load(flags.model, numerics=name), data, flags.rows):.4f}", flush=True)
    model = ds.load(flags.model)
    mean, shares = accepted_drafts(model, held_out_contexts(data, rows=8, length=96), new_tokens=48)
    by_place = " ".join(f"{share:.2f}" for share in shares)
    print(f"accepted drafts {mean:.2f} of {model.config.dspark_block_size} (by place: {by_place})", flush=True)
    for temperature in (0.0, 0.8):
        for prompt, text in zip(PROMPTS, model.generate(PROMPTS, 60, temperature=temperature), strict=True):
            print(f"--- temperature {temperature}\n{prompt}|{text}")


if __name__ == "__main__":
    main()
