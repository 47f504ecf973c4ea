"""Who runs next: the queue, and the rows and pages that requests hold. Plain bookkeeping without devices or clocks.

The queue is in the order of priority; among equals tenants take turns by the tokens they have asked for (start-time
fair queueing: a request's rank is the virtual time at which its tenant's share lets it start). The first of the queue
waits until a row and the pages for its prompt and a part of its answer are free, and nobody passes it.

An answer takes pages as it grows. Where none is free, the request of the lowest rank on that device leaves its row and
begins again later: with the same rank, so nobody begins again for ever.
"""

import bisect
from collections.abc import Iterator

from dsv41_jax.cache import pages_for
from dsv41_jax.serving.executor import CacheSize
from dsv41_jax.serving.pages import PagePool
from dsv41_jax.serving.task import Task


class Scheduler:
    """Queue, rows and pages of a server.

    Args:
        size: of the cache. reserve: tokens of an answer that pages are kept for when a request starts.

    Attributes:
        waiting: the queue in order. rows: {row: the task in it}.
    """

    def __init__(self, size: CacheSize, reserve: int):
        self.size, self.reserve = size, reserve
        self.pool = PagePool(size.pages, size.shards)
        self.waiting: list[Task] = []
        self.rows: dict[int, Task] = {}
        self._now = 0.0  # virtual time: tokens served at an equal share
        self._finish: dict[str, float] = {}

    def add(self, task: Task) -> None:
        """Queue a task that is new."""
        request = task.request
        start = max(self._now, self._finish.get(request.tenant, 0.0))
        self._finish[request.tenant] = start + task.prompt_length + request.max_new_tokens
        task.rank = (request.priority, start, task.number)
        bisect.insort(self.waiting, task, key=lambda t: t.rank)

    def admit(self) -> Iterator[Task]:
        """Give rows and the pages of their prompts to those at the head of the queue that fit."""
        while self.waiting:
            task = self.waiting[0]
            wanted = self._wanted(task)
            placed = self._place(wanted)
            if placed is None:
                return
            self.waiting.pop(0)
            self._now = max(self._now, task.rank[1])
            self._finish = {tenant: at for tenant, at in self._finish.items() if at > self._now}
            task.row, task.reserved = placed, wanted
            task.pages = self.pool.take(self.size.shard_of(placed), pages_for(task.prompt_length + len(task.output)))
            self.rows[placed] = task
            yield task

    def grow(self, task: Task, tokens: int) -> tuple[bool, list[Task]]:
        """Pages for so many tokens of a task in a row.

        Returns:
            whether it got new ones, and the tasks that had to leave their rows for it: it may be among them itself.
        """
        missing = pages_for(tokens) - len(task.pages)
        if missing <= 0:
            return False, []
        shard, left = self.size.shard_of(task.row), []
        while self.pool.free(shard) < missing:
            victim = max((t for t in self.rows.values() if self.size.shard_of(t.row) == shard), key=lambda t: t.rank)
            self.release(victim)
            bisect.insort(self.waiting, victim, key=lambda t: t.rank)
            left.append(victim)
            if victim is task:
                return False, left
        task.pages += self.pool.take(shard, missing)
        return True, left

    def release(self, task: Task) -> None:
        """A task leaves its row, or the queue."""
        if task.row is None:
            self.waiting.remove(task)
            return
        del self.rows[task.row]
        self.pool.give_back(self.size.shard_of(task.row), task.pages)
        task.leave()

    def _wanted(self, task: Task) -> int:
        """Pages that must be free for it to start."""
        answer = min(len(task.output) + self.reserve, task.request.max_new_tokens)
        return pages_for(task.prompt_length + answer)

    def _place(self, pages: int) -> int | None:
        """A free row on the device with the most pages to spare; None where they do not suffice."""
        spare = [self.pool.free(shard) for shard in range(self.size.shards)]
        for task in self.rows.values():
            spare[self.size.shard_of(task.row)] -= max(task.reserved - len(task.pages), 0)
        rows = [row for row in range(self.size.rows) if row not in self.rows]
        fitting = [row for row in rows if spare[self.size.shard_of(row)] >= pages]
        return max(fitting, key=lambda row: (spare[self.size.shard_of(row)], -row), default=None)
