"""Tokenises text files, JSON lines or Parquet into ArrayRecord shards for training.

python launch/tokenize.py notes/ more.txt --out=data/notes --tokenizer=DeepSeek-V4.1-Flash --held_out=0.01
python launch/tokenize.py chats.jsonl --out=data/chats --tokenizer=MODEL --prompt_field=ask --response_field=answer
python launch/tokenize.py pairs.parquet --out=data/pairs --tokenizer=MODEL --text_field=caption --image_field=image

Writes OUT/train, OUT/heldout and OUT/manifest.json (documents, tokens, bytes, checksums); a training config names
OUT/train as a source. OUT appears when it is complete.
"""

# `python launch/serve.py` puts this folder first on the module path, where the standard library would find this file
# instead of its own `tokenize`: whoever imports that name gets the standard one.
if __name__ == "tokenize":
    import importlib.machinery
    import os
    import sys

    _standard = os.path.join(os.path.dirname(os.__file__), "tokenize.py")
    importlib.machinery.SourceFileLoader("tokenize", _standard).exec_module(sys.modules["tokenize"])

import argparse
import dataclasses
import sys
import typing


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; see --help."""
    from dsv41_jax.training.tokenize_corpus import TokenizeSettings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, or folders of files")
    parser.add_argument("--out", required=True, help="new folder")
    hints = typing.get_type_hints(TokenizeSettings)
    for field in dataclasses.fields(TokenizeSettings):
        kind = next(
            each for each in typing.get_args(hints[field.name]) or (hints[field.name],) if each is not type(None)
        )
        shown = "" if field.default in (None, "", False) else f" (default: {field.default})"
        how = {"action": "store_true"} if kind is bool else {"type": kind, "choices": field.metadata.get("choices")}
        text = (field.metadata["help"] + shown).replace("%", "%%")
        parser.add_argument(f"--{field.name}", default=field.default, required=field.default == "", help=text, **how)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Tokenise; `argv` as on the command line. Returns the exit status."""
    flags = vars(parse(argv))
    from dsv41_jax.checkpoint.safetensors_file import CheckpointError
    from dsv41_jax.training.tokenize_corpus import TokenizeSettings, tokenize_corpus

    inputs, out = flags.pop("inputs"), flags.pop("out")
    try:
        manifest = tokenize_corpus(inputs, out, TokenizeSettings.of(flags))
    except (ValueError, TypeError, OSError, CheckpointError) as error:
        print(f"tokenize: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"tokenize: interrupted; {out} was not written", file=sys.stderr)
        return 130
    for name, part in manifest["parts"].items():
        print(f"{out}/{name}: {part['documents']:,} documents, {part['tokens']:,} tokens, {len(part['shards'])} shards")
    return 0


if __name__ == "__main__":
    sys.exit(main())
