"""Makes the demo model's training data: two Debian packages -> text -> tokenizer -> token arrays.

    apt-get download sword-comm-tdavid bible-kjv-text
    python launch/demo_data.py --treasury sword-comm-tdavid_*.deb --scripture bible-kjv-text_*.deb --out demo_data

Writes into --out: train.txt, heldout.txt, tokenizer.json, tokenizer_config.json, train.npy and heldout.npy (uint16 ids:
BOS, a block, EOS where its document ends), and data.json with every count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from dsv41_jax.token_map import load_token_map
from dsv41_jax.training import corpus
from dsv41_jax.training.demo_tokenizer import SPECIAL, save_tokenizer, train_tokenizer


def token_stream(tokenizer: Tokenizer, blocks: list[corpus.Block]) -> np.ndarray:
    """uint16 [tokens]: BOS before every block, EOS after the last block of a document."""
    bos, eos = (tokenizer.token_to_id(name) for name in SPECIAL[:2])
    stream: list[int] = []
    for block, encoding in zip(blocks, tokenizer.encode_batch([block.text for block in blocks]), strict=True):
        stream += [bos, *encoding.ids] + [eos] * block.ends_document
    return np.array(stream, np.uint16)


def make_demo_data(treasury: str | Path, scripture: str | Path, out: str | Path) -> dict:
    """Makes the files named above and returns the contents of data.json."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    blocks = corpus.blocks(corpus.documents(treasury, scripture))
    parts = {"train": [b for b in blocks if not b.held_out], "heldout": [b for b in blocks if b.held_out]}
    tokenizer = train_tokenizer(block.text for block in parts["train"])
    save_tokenizer(tokenizer, out)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))

    facts: dict = {
        "vocab_size": tokenizer.get_vocab_size(),
        "compressed_vocab_size": int(load_token_map(out).max()) + 1,
        "tokenizer_bytes": (out / "tokenizer.json").stat().st_size,
        "packages": {Path(p).name: hashlib.sha256(Path(p).read_bytes()).hexdigest() for p in (treasury, scripture)},
    }
    for name, part in parts.items():
        text = "".join(block.text for block in part)
        stream = token_stream(tokenizer, part)
        (out / f"{name}.txt").write_text(text, encoding="ascii")
        np.save(out / f"{name}.npy", stream)
        bos, eos = (tokenizer.token_to_id(mark) for mark in SPECIAL[:2])
        plain = stream[(stream != bos) & (stream != eos)]
        if tokenizer.decode(plain.tolist(), skip_special_tokens=False) != text:
            raise ValueError(f"{name}: the tokens do not decode to the text")
        facts[name] = {
            "blocks": len(part),
            "documents": sum(block.ends_document for block in part),
            "bytes": len(text),
            "tokens": len(stream),
            "bytes_per_token": round(len(text) / len(plain), 4),
            "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        }
    (out / "data.json").write_text(json.dumps(facts, indent=2) + "\n")
    return facts


def main(argv: list[str] | None = None) -> None:
    """Write the corpus that the two packages hold into a folder; `argv` as on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--treasury", required=True, help="the sword-comm-tdavid .deb file")
    parser.add_argument("--scripture", required=True, help="the bible-kjv-text .deb file")
    parser.add_argument("--out", required=True, help="folder to write the data into")
    flags = parser.parse_args(argv)
    print(json.dumps(make_demo_data(flags.treasury, flags.scripture, flags.out), indent=2))


if __name__ == "__main__":
    main()
