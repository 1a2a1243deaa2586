"""Read row groups ahead of their use, in threads and under a budget of bytes.

Which row groups a rank will read, in which order, and how many rows it will take from each is known
before the epoch starts. So a row group is fetched when the budget has room for it, kept until its
last row was taken, and read twice only where the budget is smaller than what is needed at once.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from rollout.decoded_block import DecodedBlock
from rollout.epoch_plan import Block

_log = logging.getLogger(__name__)

_AHEAD_PER_THREAD: Final = 2


class BlockCache:
    """Row groups, read ahead; used by one thread.

    Args:
        read: reads a row group; called in the cache's threads.
        estimate: bytes of a row group that was not read yet, roughly.
        upcoming: row groups in the order of their first use.
        rows: how many rows of each row group will be taken in all.
        budget_bytes: bytes held and in flight; what one batch needs is held in any case.
        threads: that read, and decode for batches.
    """

    def __init__(
        self,
        read: Callable[[Block], DecodedBlock],
        estimate: Callable[[Block], int],
        *,
        upcoming: Iterable[Block],
        rows: Counter[Block],
        budget_bytes: int,
        threads: int,
    ) -> None:
        self._read = read
        self._estimate = estimate
        self._upcoming = deque(upcoming)
        self._rows = rows
        self._budget = budget_bytes
        # further ahead helps no thread, and costs warm memory
        self._most_ahead = _AHEAD_PER_THREAD * threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rollout-decode")
        self._held: OrderedDict[Block, Future[DecodedBlock]] = OrderedDict()
        self._sizes: dict[Block, int] = {}
        self._used: set[Block] = set()
        self._evicted: set[Block] = set()
        self._told = False

    def get(self, block: Block) -> DecodedBlock:
        """Return a row group; waits for it where it is still being read.

        Raises:
            DatasetError: see `ShardReader.read`.
        """
        self._fill()
        if block not in self._held:
            self._tell_once(block)
            self._submit(block)
        self._held.move_to_end(block)
        decoded = self._held[block].result()
        self._sizes[block] = decoded.num_bytes
        self._used.add(block)
        self._evict()
        return decoded

    def take(self, block: Block, count: int) -> None:
        """Say that rows of a row group were taken or are not needed; after the last it goes."""
        self._rows[block] -= count
        if self._rows[block] <= 0:
            self._drop(block)

    def submit(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run something else in the threads, behind what was asked for before."""
        return self._pool.submit(task, *arguments)

    @property
    def num_bytes(self) -> int:
        """Bytes held and in flight."""
        return sum(self._sizes.values())

    def close(self) -> None:
        """Stop the threads and forget everything."""
        self._upcoming.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._held.clear()
        self._sizes.clear()

    def _fill(self) -> None:
        """Start reading ahead as far as the budget allows."""
        used = ahead = 0
        for block, future in self._held.items():
            ahead += block not in self._used
            if future.done() and future.exception() is None:
                self._sizes[block] = future.result().num_bytes
            used += self._sizes[block]
        while self._upcoming and ahead < self._most_ahead:
            block = self._upcoming[0]
            if block in self._held or self._rows[block] <= 0:
                self._upcoming.popleft()
                continue
            used += self._estimate(block)
            if used > self._budget:
                return
            self._upcoming.popleft()
            self._submit(block)
            ahead += 1

    def _submit(self, block: Block) -> None:
        self._sizes[block] = self._estimate(block)
        self._held[block] = self._pool.submit(self._read, block)

    def _evict(self) -> None:
        """Give up what is needed last, as far as that is known; never the one in use."""
        used = self.num_bytes
        *others, _ = self._held
        unused = [block for block in others if block not in self._used]
        # read ahead but not used yet: the last first, to be read ahead again later
        for block in reversed(unused):
            if used <= self._budget:
                return
            used -= self._sizes[block]
            self._drop(block)
            self._upcoming.appendleft(block)
        for block in others:
            if used <= self._budget:
                return
            if block in self._used:
                used -= self._sizes[block]
                self._evicted.add(block)
                self._drop(block)

    def _drop(self, block: Block) -> None:
        future = self._held.pop(block, None)
        self._sizes.pop(block, None)
        if future is not None:
            future.cancel()

    def _tell_once(self, block: Block) -> None:
        if block in self._evicted and not self._told:
            self._told = True
            _log.warning(
                "row groups are read more than once: what a step mixes does not fit into "
                "prefetch_bytes %d: raise it, or lower window_blocks or groups_per_step",
                self._budget,
            )
