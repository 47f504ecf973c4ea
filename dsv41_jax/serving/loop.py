"""One round of the engine after another: read prompts, draw tokens, feed them back. One thread, no locks.

A round reads prompts for at most `max_stall` seconds while texts are being written (by the times that its last blocks
took; one block at least), then draws a token for every row whose logits are there, then feeds the drawn ones. With no
text being written it reads one block.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
from jax import Array

from dsv41_jax.completion import GeneratedToken
from dsv41_jax.config import ModelConfig
from dsv41_jax.engram_hash import EngramHasher
from dsv41_jax.serving.executor import Executor
from dsv41_jax.serving.request import Ended, EndReason, Observer
from dsv41_jax.serving.sampler import Sampler
from dsv41_jax.serving.scheduler import Scheduler
from dsv41_jax.serving.steps import Block, EmbedImage, SetRows, Step
from dsv41_jax.serving.task import Task

_log = logging.getLogger(__name__)
_FORGET = 0.9  # how slowly the time of a block that took long is forgotten


@dataclasses.dataclass
class Counters:
    """What the loop has done since its start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preempted: int = 0
    steps: int = 0


class Loop:
    """The engine's work, round by round.

    Args:
        executor: this host's. run: runs a step here, and on the other hosts of a pod.
        max_stall: seconds. clock: seconds, monotonic.

    Attributes:
        ended: called with each task that has ended, after its sink.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        observer: Observer | None,
        max_stall: float,
        run: Callable[[Step], Array | np.ndarray | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        runner, size = executor.runner, executor.size
        self.executor, self.scheduler, self.observer = executor, scheduler, observer
        self.max_stall, self.clock, self.run = max_stall, clock, run or executor.run
        self.ended: Callable[[Task], None] = lambda task: None
        self.counters = Counters()
        self.sampler = Sampler(size.rows, runner.config.vocab_size)
        self._together = runner.mesh is not None  # every step of a mesh has all rows
        self._lookback = 0 if self.hasher is None else self.hasher.lookback
        self._history = np.zeros((size.rows, self._lookback), np.int64)
        self._seconds: dict[str, float] = {}
        self._turn = 0
        self._changed: set[Task] = set()

    @property
    def config(self) -> ModelConfig:
        return self.executor.runner.config

    @property
    def hasher(self) -> EngramHasher | None:
        return self.executor.runner.hasher

    # --- one round ---------------------------------------------------------------------------------------------------

    def round(self) -> None:
        """Everything once. Nothing is left to do when the scheduler has neither rows nor a queue."""
        for task in self.scheduler.admit():
            self._begin(task)
        self._read_prompts()
        self._draw()
        self._feed()

    def end(self, task: Task, reason: EndReason, message: str = "") -> None:
        """A task is over, wherever it is: its row and pages are free."""
        self.scheduler.release(task)
        self._changed.discard(task)
        ended = Ended(reason, task.prompt_length, len(task.output), 0, message)
        if self.observer is not None:
            self.observer.ended(ended)
        self._tell(task, task.request.sink.done, ended)
        self.ended(task)

    def tasks(self) -> list[Task]:
        """All that have not ended."""
        return [*self.scheduler.rows.values(), *self.scheduler.waiting]

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _begin(self, task: Task) -> None:
        request = task.request
        task.begin(self.executor.runner, self.executor.block)
        if not task.output:
            self.counters.prompt_tokens += task.prompt_length
        self.sampler.start(task.row, request.sampling, request.stream, request.token_ids, task.output)
        self._changed.add(task)

    def _set_rows(self) -> None:
        """Tell the devices of new rows and new pages."""
        if not self._changed:
            return
        tasks = sorted(self._changed, key=lambda task: task.row)
        self._changed.clear()
        tables = np.zeros((len(tasks), self.executor.size.per_row), np.int32)
        for i, task in enumerate(tasks):
            tables[i, : len(task.pages)] = task.pages
        floors = [[task.reading.begin for task in tasks], [task.reading.split for task in tasks]]
        rows = np.array([task.row for task in tasks], np.int32)
        self.run(SetRows(rows, tables, np.array(floors, np.int32)))

    def _readers(self) -> list[Task]:
        """Tasks that are read, the one whose turn it is first. Of those of the best priority, every other block goes to
        the prompt with the least left: short ones do not wait for long ones. A fourth goes to the one that came first,
        and a fourth to the one that came first of all priorities: none waits for ever.
        """
        tasks = [task for task in self.scheduler.rows.values() if task.is_reading]
        if self._turn % 4 == 2:
            return sorted(tasks, key=lambda task: task.number)
        shortest = self._turn % 2
        return sorted(tasks, key=lambda t: (t.request.priority, len(t.blocks) * shortest, t.number))

    def _read_prompts(self) -> None:
        writing = any(task.feeds or task.fresh for task in self.scheduler.rows.values())
        spent = 0.0
        while readers := self._readers():
            kind, units = self._next_units(readers)
            if spent and spent + self._seconds.get(kind, 0.0) > self.max_stall:
                return
            began = self.clock()
            self._set_rows()
            units()
            self.executor.wait()
            took = self.clock() - began
            self._seconds[kind] = max(took, _FORGET * self._seconds.get(kind, 0.0))
            spent += took
            self._turn += 1
            if not writing:
                return

    def _next_units(self, readers: list[Task]) -> tuple[str, Callable[[], None]]:
        """What comes next for the first reader; on a mesh also for one of each other device that needs the same."""
        task = readers[0]
        if len(task.spans) < len(task.request.images):
            return "image", lambda: self._embed(task)
        layers, shard_of = task.blocks[0][0], self.executor.size.shard_of
        same: dict[int, Task] = {}
        for other in readers:
            if len(other.spans) == len(other.request.images) and other.blocks[0][0] == layers:
                same.setdefault(shard_of(other.row), other)
        return layers, lambda: self._read(layers, list(same.values()) if self._together else [task])

    def _embed(self, task: Task) -> None:
        image = task.request.images[len(task.spans)]
        self.counters.steps += 1
        task.spans.append(self.run(EmbedImage(image.patches.astype(np.float32), image.grid)))

    def _read(self, layers: str, tasks: list[Task]) -> None:
        """The next block of each task, which on a mesh are on different devices; there the others repeat the first
        task's, and count for nothing.
        """
        size, width, hasher, cache = self.executor.block, self.config.hidden_size, self.hasher, self.executor.size
        rows, of_shard = (cache.shards, cache.rows // cache.shards) if self._together else (1, cache.rows)
        source, held = [tasks[0]] * rows, np.full(rows, -1)
        for task in tasks:
            at = cache.shard_of(task.row) if self._together else 0
            source[at], held[at] = task, task.row
        places = [task.blocks[0][1:] for task in source]
        images = [task.image_part(*place, size, width) for task, place in zip(source, places, strict=True)]
        mask = embeds = None
        if any(part is not None for part in images):
            dtype = self.executor.runner.numerics.dtype
            empty = (np.zeros((1, size), bool), np.zeros((1, size, width), dtype))
            mask, embeds = (np.concatenate(parts) for parts in zip(*(part or empty for part in images), strict=True))
        engram = announced = None
        if hasher is not None:
            engram = np.concatenate(
                [task.engram_rows(hasher, *place, size) for task, place in zip(source, places, strict=True)], axis=1
            )
            if self.executor.runner.tables and len(tasks[0].blocks) > 1:
                announced = tasks[0].engram_rows(hasher, *tasks[0].blocks[1][1:], size)
        logits = self._step(
            Block(
                first=0 if self._together else tasks[0].row,
                own_rows=np.maximum(held % of_shard, 0).astype(np.int32) if self._together else None,
                layers=layers,
                token_ids=np.concatenate([task.ids(*place, size) for task, place in zip(source, places, strict=True)]),
                start=np.array([first for first, _ in places], np.int32),
                n_valid=np.array([stop - first for first, stop in places], np.int32) * (held >= 0),
                write_floor=np.zeros(rows, np.int32),
                engram_rows=engram,
                announced=announced,
                image_mask=mask,
                image_embeds=embeds,
            )
        )
        for task in tasks:
            task.blocks.pop(0)
        done = [task for task in tasks if not task.blocks]
        if not done:
            return
        rows_done = [task.row for task in done]
        self.sampler.put(logits, np.where(np.isin(held, rows_done), held, -1))
        for task in done:
            task.fresh = task.fed == len(task.output)
            if hasher is not None:
                self._history[task.row] = task.history(hasher)[0]

    def _step(self, block: Block) -> Array | None:
        self.counters.steps += 1
        return self.run(block)

    # --- tokens ------------------------------------------------------------------------------------------------------

    def _draw(self) -> None:
        """A token for every task whose logits are there."""
        tasks = {row: task for row, task in sorted(self.scheduler.rows.items()) if task.fresh}
        if not tasks:
            return
        mask = self._mask(tasks)
        tasks = {row: task for row, task in tasks.items() if task.row is not None}
        wanted = np.zeros(self.executor.size.rows, bool)
        steps = np.zeros(self.executor.size.rows, np.int32)
        for row, task in tasks.items():
            wanted[row], steps[row] = True, len(task.output)
        tokens = self.sampler.choose(wanted, steps, mask)
        top = {row: task.request.logprobs for row, task in tasks.items() if task.request.logprobs is not None}
        reported = self.sampler.logprobs(tokens, top) if top else {}
        for row, task in tasks.items():
            self._take(task, GeneratedToken(row, int(tokens[row]), reported.get(row)))

    def _mask(self, tasks: dict[int, Task]) -> np.ndarray | None:
        """Allowed ids uint32 [rows, ceil(V / 32)], or None where all are, of every row."""
        mask = None
        for row, task in tasks.items():
            constraint = task.request.constraint
            if constraint is None:
                continue
            own = np.zeros(-(-self.config.vocab_size // 32), np.int32)
            try:
                limited = constraint.fill(own)
            except Exception as error:
                _log.exception("the constraint of request %s failed", task.id)
                self.end(task, "failed", f"the constraint on the answer failed: {error}")
                continue
            if not limited:
                continue
            if not own.any():
                self.end(task, "failed", "the constraint on the answer allows no token here")
                continue
            if mask is None:
                mask = np.full((self.executor.size.rows, len(own)), 0xFFFFFFFF, np.uint32)
            mask[row] = own.view(np.uint32)
        return mask

    def _take(self, task: Task, token: GeneratedToken) -> None:
        """A task has drawn a token."""
        request, now = task.request, self.clock()
        task.fresh = False
        if token.token_id in request.stop_ids:
            self.end(task, "stop")
            return
        task.output.append(token.token_id)
        self.counters.completion_tokens += 1
        if self.observer is not None:
            if task.last_token is None:
                self.observer.first_token(now - task.submitted)
            else:
                self.observer.next_token(now - task.last_token)
        task.last_token = now
        if request.constraint is not None:
            request.constraint.advance(token.token_id)
        if self._tell(task, request.sink.token, token):
            self.end(task, "stop")
        elif len(task.output) == request.max_new_tokens:
            self.end(task, "length")

    def _tell(self, task: Task, tell: Callable, what: object) -> bool:
        """Call a sink. One that fails ends its own request and no other."""
        try:
            return bool(tell(what))
        except Exception:
            _log.exception("the receiver of request %s failed", task.id)
            return True

    # --- decode ------------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Give every task's next token to the model."""
        for task in sorted(self.scheduler.rows.values(), key=lambda task: task.rank):
            if not task.feeds:
                continue
            grown, left = self.scheduler.grow(task, task.length + 1)
            for victim in left:
                self._changed.discard(victim)
                self.counters.preempted += 1
                _log.info("request %s makes room after %d tokens, and begins again", victim.id, len(victim.output))
            if grown:
                self._changed.add(task)
        tasks = {row: task for row, task in self.scheduler.rows.items() if task.feeds}
        if not tasks:
            return
        self._set_rows()
        for first, logits in self._decoded(tasks):
            rows = np.arange(first, first + self.executor.tile)
            self.sampler.put(logits, np.where(np.isin(rows, list(tasks)), rows, -1))
        for task in tasks.values():
            task.fed += 1
            task.fresh = task.fed == len(task.output)

    def _decoded(self, tasks: dict[int, Task]) -> Iterator[tuple[int, Array]]:
        """Logits by tiles of rows; tiles without a task are left out."""
        height, hasher = self.executor.tile, self.hasher
        for first in range(0, self.executor.size.rows, height):
            here = {row - first: task for row, task in sorted(tasks.items()) if first <= row < first + height}
            if not here:
                continue
            ids, start = np.zeros((height, 1), np.int32), np.zeros(height, np.int32)
            valid = np.zeros(height, np.int32)
            for at, task in here.items():
                ids[at], start[at], valid[at] = task.output[task.fed], task.length, 1
            engram = None
            if hasher is not None:
                history = self._history[first : first + height]
                compressed = hasher.compress(ids)
                engram = hasher.hash(compressed, history)
                engram[:, valid == 0] = engram[:, [min(here)]]  # idle rows read nothing of their own
                moved = np.concatenate([history, compressed], axis=1)[:, 1:]
                self._history[first : first + height] = np.where(valid[:, None] == 1, moved, history)
            block = Block(first, "all", ids, start, valid, np.zeros(height, np.int32), engram)
            yield first, self._step(block)
