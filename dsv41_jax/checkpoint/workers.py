"""Work done by a few threads, with results in order. Reading, checksums and writing all release Python's lock."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

WORKERS = 4

Item, Result = TypeVar("Item"), TypeVar("Result")


def each(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """(item, work(item)) in order, with WORKERS of them being worked on and as many more taken from `items`."""
    queue, items = deque(), iter(items)
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            for item in itertools.islice(items, 2 * WORKERS):
                queue.append((item, pool.submit(work, item)))
            while queue:
                item, future = queue.popleft()
                yield item, future.result()
                for following in itertools.islice(items, 1):
                    queue.append((following, pool.submit(work, following)))
        finally:
            for _, future in queue:
                future.cancel()
