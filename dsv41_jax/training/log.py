"""The log of a run: one JSON object a line, and the same numbers for TensorBoard.

After a resume the log holds each step once: what a killed run had written past its checkpoint is taken out.
"""

import json
import os
from pathlib import Path
from typing import Any

LOG_FILE = "train_log.jsonl"
_DIGITS = 7  # of a float32


class Log:
    """Appends to RUN/train_log.jsonl, and to RUN/tensorboard if asked to.

    Args:
        folder: of the run.
        after: steps done; lines of later ones are removed.
        tensorboard: also write event files; ModuleNotFoundError says what to install.
    """

    def __init__(self, folder: str | Path, after: int, tensorboard: bool = False):
        self.path = Path(folder) / LOG_FILE
        _cut(self.path, after)
        self._writer = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    f"{error}; install it with pip install 'dsv41-jax[train]', or set tensorboard=False"
                ) from error
            self._writer = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=after + 1)

    def __call__(self, kind: str, step: int, **values: Any) -> None:
        """A line: what it tells ("train", "evaluation", "start", ...), the steps done, and its values."""
        line = {"kind": kind, "step": step, **{name: _short(value) for name, value in values.items()}}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _short(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def read_log(path: str | Path) -> list[dict]:
    """The lines of a log; one that a kill cut short is left out."""
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _cut(path: Path, after: int) -> None:
    """Take out what was logged of steps past `after`, and half lines."""
    if not path.is_file():
        return
    kept = [line for line in read_log(path) if line.get("step", 0) <= after]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)
