"""What the model would do on a machine that is not there: whether it fits, and what bounds its speed.

    python launch/plan.py --topology=v5p:4x4x4 --config=configs/flash.py --batch=64 --context=131072
    python launch/plan.py --topology v5p:4x4x4 v6e:4x4 h200:1x8 --phase=prefill --png=plan.png
    python launch/plan.py --topology=v6e:4x4 --engram=host --find

The model's real step is compiled ahead of time for the topology, in a process of its own for each; nothing of it runs.
`python -m dsv41_jax.topologies` prints the names of topologies and the figures of their chips with the sources. Needs
libtpu for TPUs and JAX's CUDA plugin for GPUs, and neither a TPU nor a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from dsv41_jax.plan import find, picture, text
from dsv41_jax.plan.report import Report
from dsv41_jax.plan.request import ENGRAM, PHASES, STORAGE, Request
from dsv41_jax.plan.run import plan_all
from dsv41_jax.topologies import EXAMPLES

_FOUND = 3  # meshes that --find compiles


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--topology", nargs="+", required=True, help=f"one or several machines, such as {', '.join(EXAMPLES)}"
    )
    parser.add_argument("--config", default="configs/flash.py", help="the model's sizes (default: configs/flash.py)")
    parser.add_argument("--batch", type=int, default=64, help="rows, on all devices together (default: 64)")
    parser.add_argument("--context", type=int, default=16384, help="tokens in the cache of a row (default: 16384)")
    parser.add_argument(
        "--phase",
        nargs="+",
        default=["decode"],
        choices=PHASES,
        help="decode: a token of every row; prefill: the encoder on a block of every row; verify: anchor and drafts; "
        "train: a training step (default: decode)",
    )
    parser.add_argument("--block", type=int, default=512, help="tokens of a row in a prefill step (default: 512)")
    parser.add_argument(
        "--mesh",
        default=None,
        metavar="DATAxCONTEXTxTENSOR",
        help="sizes of the mesh's axes, such as 16x1x4 (default: chosen by a rule, and printed)",
    )
    parser.add_argument("--find", action="store_true", help=f"rank all meshes by arithmetic, compile the best {_FOUND}")
    parser.add_argument("--engram", default="device", choices=ENGRAM, help="where its tables are (default: device)")
    parser.add_argument(
        "--expert_storage", default="fp4", choices=STORAGE, help="form of the routed experts (default: fp4)"
    )
    parser.add_argument(
        "--schedule",
        action="store_true",
        help="also read the TPU compiler's schedule, for the bound of the vector unit (takes longer)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--png", default=None, metavar="FILE", help="draw memory and bounds into this file")
    parser.add_argument("--out", default=None, metavar="FILE", help="write the JSON into this file too")
    parser.add_argument("--hlo", default=None, metavar="FOLDER", help="keep the optimised programs' text there")
    flags = parser.parse_args(argv)
    if flags.find and (len(flags.topology) > 1 or len(flags.phase) > 1 or flags.mesh):
        parser.error("--find takes one topology and one phase, and no --mesh")
    if flags.find and flags.phase == ["train"]:
        parser.error("--find: its arithmetic is of serving; give a --mesh to plan a training step")
    for name in ("png", "out"):
        path = getattr(flags, name)
        if path and not Path(path).resolve().parent.is_dir():
            parser.error(f"--{name}: there is no folder {Path(path).resolve().parent}")
    if flags.hlo and not Path(flags.hlo).is_dir():
        parser.error(f"--hlo: there is no folder {flags.hlo}")
    return flags


def requests(flags: argparse.Namespace) -> list[Request]:
    """One for each topology and phase."""
    names = ("config", "batch", "context", "block", "mesh", "engram", "expert_storage", "schedule", "hlo")
    options = {name: getattr(flags, name) for name in names}
    return [Request(topology=name, phase=phase, **options) for name in flags.topology for phase in flags.phase]


def main(argv: list[str] | None = None) -> None:
    flags = parse(argv)
    try:
        ranked: list[find.Estimate] = []
        if flags.find:
            ranked, reports = find.find(requests(flags)[0], _FOUND)
        else:
            reports = list(plan_all(requests(flags)))
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        sys.exit(f"plan.py: {error}")
    found = {"reports": [report.as_dict() for report in reports]}
    if ranked:
        found["estimates"] = [dataclasses.asdict(estimate) for estimate in ranked]
    print(json.dumps(found, indent=1) if flags.json else printed(reports, ranked))
    if flags.out:
        Path(flags.out).write_text(json.dumps(found, indent=1) + "\n")
    if flags.png:
        picture.draw(reports, flags.png)
    if any(report.error for report in reports):
        sys.exit(1)


def printed(reports: list[Report], ranked: list[find.Estimate]) -> str:
    """One report in full, several as a table after them."""
    parts = [text.full(report) for report in reports]
    if ranked:
        parts = [text.full(reports[0]), find.text(ranked, reports)]
    elif len(reports) > 1:
        parts.append(text.table(reports))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
