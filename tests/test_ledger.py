"""The compact tables say what dicts and sets would say."""

from __future__ import annotations

import random
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

from rollout import key_table
from rollout.key_table import Column, IdSet, KeyTable
from rollout.ledger import Ledger


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "_LARGEST_RUN", 64)
    monkeypatch.setattr(key_table, "_CHUNK", 8)


@pytest.mark.usefixtures("small_runs")
def test_keys_are_numbered_as_a_dict_would() -> None:
    rng = random.Random(1)
    table, expected = KeyTable(), dict[str, int]()
    for _ in range(60):
        keys = [f"key {rng.randrange(900)}" for _ in range(rng.randrange(40))]
        asked = [*keys, "\ud800", f"other {rng.random()}"]
        assert table.find(asked).tolist() == [expected.get(key, -1) for key in asked]
        numbers = table.add(keys).tolist()
        for key in keys:
            expected.setdefault(key, len(expected))
        assert numbers == [expected[key] for key in keys]
        assert len(table) == len(expected)
    assert len(expected) > 300


@pytest.mark.usefixtures("small_runs")
def test_digests_that_agree_in_their_first_half_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digests(keys: Any) -> Any:
        # 3 different first halves
        return np.array([[int(key) % 3, int(key)] for key in keys], np.uint64).reshape(-1, 2)

    monkeypatch.setattr(key_table, "_digests", digests)
    table = KeyTable()
    keys = [str(i * 7 % 100) for i in range(100)]
    for start in range(0, 100, 9):
        table.add(keys[start : start + 9])
    assert table.find(keys).tolist() == list(range(100))
    assert table.find(["100", "101", "102"]).tolist() == [-1] * 3


@pytest.mark.usefixtures("small_runs")
def test_a_set_of_ids_finds_every_repeated_one() -> None:
    rng = random.Random(2)
    ids, seen = IdSet(), set[str]()
    for _ in range(60):
        lot = [f"id {rng.randrange(3000)}" for _ in range(rng.randrange(40))]
        expected = []
        for i, one in enumerate(lot):
            if one in seen:
                expected.append(i)
            seen.add(one)
        assert ids.add(lot) == expected
    assert len(seen) > 600


def test_many_keys_added_at_once_are_found() -> None:
    # more than one run holds, whose keys have 16 bits for their numbers
    keys = [f"k{i}" for i in range(2**16 + 2**12)]
    table = KeyTable()
    table.add(["k70", "other"])
    expected = dict.fromkeys(["k70", "other", *keys])
    numbers = {key: number for number, key in enumerate(expected)}
    assert table.add([*keys, "k0"]).tolist() == [numbers[key] for key in [*keys, "k0"]]
    assert table.find([*keys, "no"]).tolist() == [*(numbers[key] for key in keys), -1]


@pytest.mark.usefixtures("small_runs")
def test_columns_are_zero_until_set() -> None:
    column = Column()
    assert column[5] == 0
    column[19] = 3
    assert [column[i] for i in (0, 18, 19, 20, 1000)] == [0, 0, 3, 0, 0]


@pytest.mark.usefixtures("small_runs")
def test_columns_hold_any_number() -> None:
    rng = random.Random(4)
    column, expected = Column(), dict[int, int]()
    for bits in (8, 9, 16, 17, 32, 33, 63):
        for number in rng.sample(range(100), 20):
            for value in (2**bits - 1, rng.randrange(2**bits), 1):
                column[number] = expected[number] = value
                assert column[number] == value
        assert [column[i] for i in range(120)] == [expected.get(i, 0) for i in range(120)]


def test_what_is_kept_of_a_key_is_18_bytes_and_1_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    # in arrays that Python's memory is traced for
    monkeypatch.setattr(key_table, "_pages", np.zeros)
    table, column = KeyTable(), Column()
    tracemalloc.start()
    try:
        for start in range(0, 2**18, 2**13):
            numbers = table.add([f"key {i}" for i in range(start, start + 2**13)])
            column[int(numbers[-1])] = 200
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    # and some tuples that Python keeps for later
    assert held <= 19 * 2**18 + 3 * 2**16


def test_committed_samples_in_any_order() -> None:
    rng = random.Random(3)
    ledger, expected = Ledger(), set[tuple[str, int]]()
    for _ in range(400):
        keys = [(f"p{rng.randrange(9)}", rng.randrange(70)) for _ in range(rng.randrange(5))]
        new = set(keys) - expected
        assert ledger.cover(keys) == len(keys) - len(new)
        expected |= new
        assert ledger.num_covered == len(expected)
    assert 300 < len(expected) < 630
    for prompt in range(9):
        (number,) = ledger.numbers([f"p{prompt}"])
        own = {index for key, index in expected if key == f"p{prompt}"}
        assert {i for i in range(90) if ledger.covers(number, i)} == own
        assert ledger.num_samples(number) == len(own)
        assert ledger.missing(number, 70) == [i for i in range(70) if i not in own]


def test_a_prompt_keeps_its_first_unit() -> None:
    ledger = Ledger()
    assert ledger.plan(["a", "b", "a"], ["u1", "u0", "u2"]) == 2
    assert ledger.plan(["b", "c"], ["u2", "u1"]) == 1
    assert ledger.units_of(["a", "b", "c", "d"]) == ["u1", "u0", "u1", None]
    assert (ledger.units, ledger.num_planned) == (["u1", "u0"], 3)


def test_what_is_set_aside_and_when() -> None:
    ledger = Ledger()
    ledger.set_aside([("a", None), ("b", 2)])
    ledger.set_aside([("c", None), ("d", 1)], since=True)
    a, b, c, d = ledger.numbers(["a", "b", "c", "d"])
    assert [ledger.is_set_aside(n) for n in (a, b, c, d)] == [True, False, True, False]
    assert [ledger.set_aside_since(n) for n in (a, b, c, d)] == [False, False, True, False]
    assert [ledger.set_aside_since(d, i) for i in (0, 1)] == [False, True]
    assert not ledger.set_aside_since(b, 2)


def test_threads_agree_on_numbers() -> None:
    table = KeyTable()
    keys = [f"k{i}" for i in range(4000)]
    found: dict[int, list[int]] = {}

    def add(seed: int) -> None:
        own = random.Random(seed).sample(keys, len(keys))
        for start in range(0, len(own), 100):
            table.add(own[start : start + 100])
        found[seed] = table.find(keys).tolist()

    threads = [threading.Thread(target=add, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(table) == 4000
    assert sorted(found[0]) == list(range(4000))
    assert found[0] == found[1] == found[2] == found[3]
