"""Serves a model over HTTP with the APIs of OpenAI and Anthropic, and a chat page.

python launch/serve.py --config=configs/serve_demo.py

Settings come from the config, and flags change them. On several hosts the same command runs on each; process 0 serves.
See docs/serving.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys

from dsv41_jax import compile_cache, distributed
from dsv41_jax.serving.settings import ServeSettings
from dsv41_jax.settings import config_values

_YES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_MAY_DIFFER = ("compilation_cache", "host", "port", "api_key_file")


def _yes_or_no(text: str) -> bool:
    try:
        return _YES[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r}: true or false is needed") from None


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_READ = {"int": int, "float": float, "str": str, "bool": _yes_or_no, "tuple[str, ...]": _list}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=None, help="file with get_config(), see configs/serve_*.py")
    parser.add_argument(
        "--compilation_cache",
        default=None,
        help="folder that keeps compiled programs for the next run (default: a folder in the user's cache)",
    )
    parser.add_argument(
        "--log_level", default="info", choices=("debug", "info", "warning", "error"), help="what is logged (info)"
    )
    group = parser.add_argument_group("settings", "change those of the config")
    for field in dataclasses.fields(ServeSettings):
        kind = getattr(field.type, "__name__", str(field.type)).split(" |")[0]
        kind = "tuple[str, ...]" if "tuple" in str(field.type) else kind
        default = ",".join(field.default) or "none" if kind.startswith("tuple") else field.default
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(f"--{field.name}", type=_READ[kind], default=None, help=field.metadata["help"] + shown)
    distributed.add_flags(parser)
    return parser.parse_args(argv)


def settings_of(flags: argparse.Namespace) -> ServeSettings:
    """The config's settings with the flags' over them.

    Raises:
        ValueError, TypeError: a setting that is wrong. OSError: no such config.
    """
    values = {} if flags.config is None else config_values(flags.config)
    for field in dataclasses.fields(ServeSettings):
        given = getattr(flags, field.name)
        if given is not None:
            values[field.name] = given
    return ServeSettings.of(values)


def run(flags: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    try:
        from dsv41_jax.serving.server import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"{error}; install what the server needs: pip install 'dsv41-jax[serve]'") from error
    code = serve(settings_of(flags), distributed.here())
    if code:
        sys.exit(code)


def main(argv: list[str] | None = None) -> None:
    """Serve; `argv` as on the command line. Ends the process with a message on bad settings."""
    flags = parse(argv)
    logging.basicConfig(level=flags.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jax").setLevel("WARNING")
    try:
        settings_of(flags)  # before other hosts are waited for
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"serve: {error}")
    compile_cache.enable(flags.compilation_cache)
    distributed.run_command("serve", run, flags, may_differ=_MAY_DIFFER)


if __name__ == "__main__":
    main()
