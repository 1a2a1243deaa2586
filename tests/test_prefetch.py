"""Row groups are decoded ahead within the budget, and read once if it suffices."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from loader_cases import open_loader, twelve_groups

from rollout.decoded_block import DecodedBlock
from rollout.epoch_plan import Block
from rollout.prefetch import BlockCache

BLOCK_BYTES = 1000


class Source:
    """Blocks of about 1,000 bytes, and a count of those alive and those read."""

    def __init__(self) -> None:
        self.reads: Counter[Block] = Counter()
        self.alive = self.most_alive = 0
        self._lock = threading.Lock()

    def read(self, block: Block) -> DecodedBlock:
        with self._lock:
            self.reads[block] += 1
            self.alive += 1
            self.most_alive = max(self.most_alive, self.alive)
        source = self

        class Counted(DecodedBlock):
            def __del__(self) -> None:
                with source._lock:
                    source.alive -= 1

        return Counted(pa.table({"advantage": np.zeros(BLOCK_BYTES // 8)}))


def open_cache(source: Source, blocks: list[Block], budget: int, rows: int = 1) -> BlockCache:
    return BlockCache(
        source.read,
        lambda block: BLOCK_BYTES,
        upcoming=blocks,
        rows=Counter(dict.fromkeys(blocks, rows)),
        budget_bytes=budget,
        threads=2,
    )


@pytest.mark.parametrize("budget", [0, 3000, 100_000])
def test_memory_stays_within_the_budget(budget: int) -> None:
    source = Source()
    blocks = [(0, i) for i in range(40)]
    cache = open_cache(source, blocks, budget)
    for block in blocks:
        assert cache.get(block).num_rows == BLOCK_BYTES // 8
        cache.take(block, 1)
    cache.close()
    assert source.reads == Counter(blocks)
    # the one in use is held whatever the budget is, and no thread runs far ahead
    assert source.most_alive <= {0: 2, 3000: 4, 100_000: 10}[budget]
    assert source.alive == 0


def test_row_groups_are_read_before_they_are_asked_for() -> None:
    source = Source()
    blocks = [(0, i) for i in range(4)]
    cache = open_cache(source, blocks, 100_000)
    cache.get(blocks[0])
    end = time.monotonic() + 30
    while source.reads.total() < 4 and time.monotonic() < end:
        time.sleep(0.001)
    assert source.reads == Counter(blocks)
    cache.close()


def test_what_does_not_fit_is_read_again_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    blocks = [(0, i) for i in range(4)]
    cache = open_cache(source, blocks, 2 * BLOCK_BYTES, rows=3)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            for block in blocks:
                cache.get(block)
                cache.take(block, 1)
    cache.close()
    assert source.reads.total() > 4
    assert caplog.text.count("row groups are read more than once") == 1


def test_an_error_of_a_thread_reaches_who_asks() -> None:
    def fail(block: Block) -> DecodedBlock:
        raise ValueError(f"no {block}")

    cache = BlockCache(
        fail, lambda block: 1, upcoming=[(0, 1)], rows=Counter({(0, 1): 1}), budget_bytes=9,
        threads=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"no \(0, 1\)"):
        cache.get((0, 1))
    cache.close()


def test_no_thread_outlives_an_iteration(tmp_path: Any) -> None:
    twelve_groups(str(tmp_path))
    batches = iter(open_loader(str(tmp_path)))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert [t for t in threading.enumerate() if t.name.startswith("rollout-decode")] == []
