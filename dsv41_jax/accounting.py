"""What the model costs, in arithmetic: parameters, those a token meets, FLOPs by phase, cache bytes, touched experts.

    parameter_count   parameters and bytes by module; active parameters
    model_flops       FLOPs of decode, prefill and verify, by closed arithmetic
    jaxpr_flops       FLOPs of any program, kernels included
    cache_size        bytes of a cache, tokens that fit

`python -m dsv41_jax.accounting --config=configs/flash.py` prints it all. Everything comes from the configuration; no
array is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dsv41_jax.cache import global_bytes_per_token
from dsv41_jax.cache_size import CacheBytes, cache_bytes, tokens_that_fit
from dsv41_jax.checkpoint.storage import EXPERT_STORAGES
from dsv41_jax.config import ConfigError, ModelConfig, load_config
from dsv41_jax.jaxpr_flops import flops, jaxpr_flops, jaxpr_work, work
from dsv41_jax.model_flops import (
    REPORT_WEIGHTS,
    Phase,
    decode,
    encoder_prefill,
    exact_prefill,
    phase,
    verify,
    weighted,
)
from dsv41_jax.parameter_count import (
    BACKBONE,
    MODULES,
    Active,
    ModuleSize,
    active_parameters,
    hand_over_parameters,
    module_of,
    module_sizes,
)

__all__ = [
    "BACKBONE",
    "MODULES",
    "REPORT_WEIGHTS",
    "Active",
    "CacheBytes",
    "ModuleSize",
    "Phase",
    "active_parameters",
    "cache_bytes",
    "decode",
    "encoder_prefill",
    "exact_prefill",
    "flops",
    "hand_over_parameters",
    "jaxpr_flops",
    "jaxpr_work",
    "module_of",
    "module_sizes",
    "phase",
    "report",
    "tokens_that_fit",
    "touched_experts",
    "verify",
    "weighted",
    "work",
]

_FLASH = Path(__file__).parent.parent / "configs/flash.py"
_UNITS = (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))


def touched_experts(n_experts: int, per_token: int, tokens: int) -> float:
    """Expected number of different experts that `tokens` tokens choose, if each chooses any `per_token` as likely."""
    return n_experts * (1 - (1 - per_token / n_experts) ** tokens)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """Columns aligned, names left and numbers right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]

    def text(line: list[str]) -> str:
        numbers = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join(["", line[0].ljust(widths[0]), *numbers]).rstrip()

    return "\n".join([title, *map(text, lines), *([f"  {note}"] if note else [])])


def _short(x: float) -> str:
    """Four digits and a decimal unit: 551.9 G."""
    for unit, size in _UNITS:
        if x >= size:
            return f"{x / size:#.4g}".rstrip(".") + f" {unit}"
    return f"{x:.4g}"


def _parameters(config: ModelConfig, expert_storage: str) -> str:
    sizes, active = module_sizes(config, expert_storage), active_parameters(config)

    def row(name: str, modules: Sequence[str]) -> list[str]:
        chosen = [active.get(module, Active()) for module in modules]
        return [
            name,
            _short(sum(sizes[module].parameters for module in modules)),
            _short(sum(sizes[module].nbytes for module in modules)),
            _short(sum(each.prefill for each in chosen)),
            _short(sum(each.decode for each in chosen)),
        ]

    rows = [row(module, [module]) for module in MODULES if sizes[module].parameters]
    rows += [row("backbone: all but the last three", BACKBONE), row("all", MODULES)]
    title = (
        f"Parameters, bytes with {expert_storage} experts, and what a token is multiplied by in CED prefill and decode"
    )
    note = f"CED prefill also hands over to the decoder: {_short(hand_over_parameters(config))} more."
    return _table(title, ["", "parameters", "bytes", "prefill", "decode"], rows, note)


def _phases(config: ModelConfig, contexts: Sequence[int]) -> str:
    rows = []
    for context in contexts:
        phases = {
            f"decode at {context:,}": decode(config, context),
            f"verify {1 + config.dspark_block_size} at {context:,}": verify(config, context),
            f"CED prefill of {context:,}": encoder_prefill(config, context),
            f"exact prefill of {context:,}": exact_prefill(config, context),
        }
        for name, each in phases.items():
            by_precision = each.by_precision()
            cells = [by_precision[precision] / each.tokens for precision in REPORT_WEIGHTS]
            cells += [each.flops / each.tokens, each.weighted(), each.weighted(stored=True)]
            rows.append([name, *map(_short, cells)])
    weights = ", ".join(f"{precision} {weight:g}" for precision, weight in REPORT_WEIGHTS.items())
    note = f"Weights: {weights}. The last column counts wo_a, which is multiplied in bf16, as FP8, as it is stored."
    return _table("FLOP for a token, by precision", ["", *REPORT_WEIGHTS, "all", "weighted", "wo_a as FP8"], rows, note)


def _caches(config: ModelConfig, batch: int, contexts: Sequence[int], free: Sequence[float]) -> str:
    rows = []
    for context in contexts:
        size = cache_bytes(config, batch, context)
        cells = map(_short, (size.pages, size.windows, size.tables, size.hbm))
        rows.append([f"{batch} x {context:,} tokens", *cells])
    title = (
        f"Cache bytes: pages (persistent, {global_bytes_per_token(config):g} a token), windows of the sequences, tables"
    )
    text = _table(title, ["", "pages", "windows", "tables", "HBM"], rows)
    for gigabytes in free:
        tokens = tokens_that_fit(config, round(gigabytes * 10**9), batch)
        text += f"\n  {gigabytes:g} GB hold {tokens:,} tokens of {batch} sequences, {tokens // batch:,} each"
    return text


def _experts(config: ModelConfig, batch: int) -> str:
    n, k = config.n_routed_experts, config.num_experts_per_tok
    rows = []
    for tokens in dict.fromkeys((1, batch, 4 * batch, 16 * batch)):
        touched = touched_experts(n, k, tokens)
        rows.append([f"{tokens:,} tokens in a step", f"{touched:,.1f}", f"{tokens * k / touched:,.2f}"])
    return _table(
        f"Experts of {n} that a layer reads, with {k} a token chosen evenly", ["", "touched", "rows each"], rows
    )


def report(
    config: ModelConfig, batch: int, contexts: Sequence[int], expert_storage: str = "fp4", free: Sequence[float] = ()
) -> str:
    """All tables as text.

    Args:
        batch: sequences. contexts: tokens of each. free: 10^9 bytes, to be filled with cache.
    """
    parts = [
        _parameters(config, expert_storage),
        _phases(config, contexts),
        _caches(config, batch, contexts, free),
        _experts(config, batch),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the tables of `--config`."""
    parser = argparse.ArgumentParser(prog="python -m dsv41_jax.accounting", description="Print what a model costs.")
    parser.add_argument("--config", default=str(_FLASH), help="configs/*.py, a config.json or its folder (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of the cache and of a step (%(default)s)")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[4096, 131072, 1048576], help="tokens of a sequence (%(default)s)"
    )
    parser.add_argument(
        "--expert-storage", choices=EXPERT_STORAGES, default="fp4", help="form of the routed experts (%(default)s)"
    )
    parser.add_argument("--free", type=float, nargs="*", default=[], help="10^9 bytes that are free for cache")
    options = parser.parse_args(arguments)
    if options.batch < 1 or min(options.context) < 1:
        parser.error(f"--batch={options.batch} --context={options.context}: both must be at least 1")
    try:
        config = load_config(options.config)
    except (OSError, ConfigError) as error:
        parser.error(f"--config={options.config}: {error}")
    print(report(config, options.batch, options.context, options.expert_storage, options.free))


if __name__ == "__main__":
    main()
