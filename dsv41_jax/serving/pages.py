"""Which pages of the cache are free."""

import heapq


class PagePool:
    """Free pages of the pools of each device; the lowest ids are given out first, so that runs repeat.

    Args:
        pages: pages of a device's pool. shards: devices that have one.
    """

    def __init__(self, pages: int, shards: int = 1):
        self.pages, self.shards = pages, shards
        self._returned: list[list[int]] = [[] for _ in range(shards)]
        self._unused = [0] * shards  # from here on no page was ever given out

    def free(self, shard: int) -> int:
        """How many are free on a device."""
        return len(self._returned[shard]) + self.pages - self._unused[shard]

    @property
    def all_free(self) -> int:
        """How many are free on all devices together."""
        return sum(map(self.free, range(self.shards)))

    def take(self, shard: int, count: int) -> list[int]:
        """So many free pages; ValueError if there are fewer."""
        if count > self.free(shard):
            raise ValueError(f"{count} pages are wanted and {self.free(shard)} are free")
        return [self._take(shard) for _ in range(count)]

    def give_back(self, shard: int, pages: list[int]) -> None:
        """These are free again."""
        for page in pages:
            heapq.heappush(self._returned[shard], page)

    def _take(self, shard: int) -> int:
        if self._returned[shard]:
            return heapq.heappop(self._returned[shard])
        self._unused[shard] += 1
        return self._unused[shard] - 1
