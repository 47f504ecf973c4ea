"""Which pages of the cache are free."""

import heapq


class PagePool:
    """Free pages of the pools of each device; the lowest ids are given out first, so that runs repeat.

    Args:
        pages: pages of a device's pool. shards: devices that have one.
    """

    def __init__(self, pages: int, shards: int = 1):
        self.pages, self.shards = pages, shards
        self._free = [list(range(pages)) for _ in range(shards)]

    def free(self, shard: int) -> int:
        """How many are free on a device."""
        return len(self._free[shard])

    @property
    def all_free(self) -> int:
        """How many are free on all devices together."""
        return sum(map(len, self._free))

    def take(self, shard: int, count: int) -> list[int]:
        """So many free pages; ValueError if there are fewer."""
        if count > len(self._free[shard]):
            raise ValueError(f"{count} pages are wanted and {len(self._free[shard])} are free")
        return [heapq.heappop(self._free[shard]) for _ in range(count)]

    def give_back(self, shard: int, pages: list[int]) -> None:
        """These are free again."""
        for page in pages:
            heapq.heappush(self._free[shard], page)
