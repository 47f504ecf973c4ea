"""Continues the pretraining of a model, or begins one; rerun after any end, it goes on where it stopped.

    python launch/train.py --config=configs/continue_pretraining.py
    python launch/train.py --config=configs/continue_pretraining.py --set steps=200 optimizer.peak_rate=1e-4

The same command runs on every host. Settings come from the config, and --set changes them. See docs/training.md.
"""

from __future__ import annotations

import argparse
import ast
import logging
import sys
from typing import Any

from dsv41_jax import compile_cache, distributed
from dsv41_jax.settings import config_values, listed


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="file with get_config(), see configs/*_pretraining.py")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="settings to change, by dotted name, as data.batch=16; --list shows all of them",
    )
    parser.add_argument("--list", action="store_true", help="print all settings with their values and end")
    parser.add_argument("--export_only", action="store_true", help="write the newest checkpoint's model and end")
    parser.add_argument(
        "--compilation_cache",
        default=None,
        help="folder that keeps compiled programs for the next run (default: a folder in the user's cache)",
    )
    parser.add_argument(
        "--log_level", default="info", choices=("debug", "info", "warning", "error"), help="what is logged (info)"
    )
    distributed.add_flags(parser)
    return parser.parse_args(argv)


def values_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The config's mapping with the changes of --set.

    Raises:
        ValueError: a config without get_config(), or a change that is no NAME=VALUE. FileNotFoundError: no such file.
    """
    values = config_values(flags.config)
    for change in flags.set:
        name, sign, text = change.partition("=")
        if not sign or not name:
            raise ValueError(f"--set {change!r}: NAME=VALUE is needed, as steps=200")
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {change!r}: {section} is no section")
        place[last] = _literal(text)
    return values


def _literal(text: str) -> Any:
    """A number, a list, None, True, False; anything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(flags: argparse.Namespace) -> None:
    """Train."""
    try:
        from dsv41_jax.training import run as training
        from dsv41_jax.training.train_settings import TrainSettings
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; install what training needs: pip install 'dsv41-jax[train]'") from error
    settings = TrainSettings.of(values_of(flags))
    if flags.export_only:
        training.export_newest(settings, distributed.here())
    else:
        training.train(settings, distributed.here())


def main(argv: list[str] | None = None) -> None:
    """Train; `argv` as on the command line. Ends the process with a message on bad settings."""
    flags = parse(argv)
    logging.basicConfig(level=flags.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("jax", "absl", "orbax"):
        logging.getLogger(noisy).setLevel("WARNING")
    try:
        from dsv41_jax.training.train_settings import TrainSettings

        settings = TrainSettings.of(values_of(flags))  # before other hosts are waited for
    except ModuleNotFoundError as error:
        sys.exit(f"train: {error}; install what training needs: pip install 'dsv41-jax[train]'")
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"train: {error}")
    if flags.list:
        print(listed(settings))
        return
    compile_cache.enable(flags.compilation_cache)
    distributed.run_command("train", run, flags, may_differ=("compilation_cache",))


if __name__ == "__main__":
    main()
