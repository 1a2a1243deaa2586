"""Packed entries against the formula, bit by bit."""

import numpy as np
import pytest

from rollout.schema.entries import canonical_order, invalid_entries, pack_entries, unpack_entries


def pack_by_hand(token: int, logprob: float) -> int:
    return (int(np.float32(logprob).view(np.uint32)) << 32) | token


def test_pack_is_the_documented_formula() -> None:
    ids = [0, 1, 151_643, 2**31 - 1]
    logprobs = [-0.5, -1e-38, -104.25, -3.0e38]
    want = [pack_by_hand(i, x) for i, x in zip(ids, logprobs, strict=True)]
    assert pack_entries(ids, logprobs).tolist() == want


def test_logprob_zero_packs_to_the_bare_id() -> None:
    assert pack_entries([7, 2**31 - 1], [0.0, -0.0]).tolist() == [7, 2**31 - 1]


def test_unpack_returns_the_same_bits() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0x80000001, 0xFF800000, 100_000).astype(np.uint32)
    logprobs = bits.view(np.float32)
    ids = rng.integers(0, 2**31, 100_000)
    got_ids, got_logprobs = unpack_entries(pack_entries(ids, logprobs))
    assert got_ids.dtype == np.int32
    assert np.array_equal(got_ids, ids)
    assert np.array_equal(got_logprobs.view(np.uint32), bits)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-6])
def test_pack_refuses_what_is_no_logprob(value: float) -> None:
    with pytest.raises(ValueError, match="expected finite and <= 0"):
        pack_entries([1, 2], [-1.0, value])


@pytest.mark.parametrize("token", [-1, 2**31])
def test_pack_refuses_ids_outside_int32(token: int) -> None:
    with pytest.raises(ValueError, match=r"expected 0\.\.2147483647"):
        pack_entries(np.array([1, token]), [-1.0, -1.0])


def test_pack_refuses_float_ids_and_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="expected integers"):
        pack_entries([1.0], [-1.0])
    with pytest.raises(ValueError, match="expected two equal"):
        pack_entries([1, 2], [-1.0])


def test_unpack_refuses_signed_entries() -> None:
    with pytest.raises(ValueError, match="expected uint64"):
        unpack_entries(np.zeros(2, np.int64))


@pytest.mark.parametrize(
    ("entry", "bad"),
    [
        (pack_by_hand(5, 0.0), 0),
        (pack_by_hand(2**31 - 1, -3.4e38), 0),
        (pack_by_hand(0, -1e-45), 0),
        (pack_by_hand(5, -0.0), 1),
        (pack_by_hand(5, 1e-45), 1),
        (pack_by_hand(5, 2.0), 1),
        (pack_by_hand(5, np.nan), 1),
        (pack_by_hand(5, np.inf), 1),
        (pack_by_hand(5, -np.inf), 1),
        (2**31, 1),
        (pack_by_hand(2**31, -1.0), 1),
        (2**64 - 1, 1),
    ],
)
def test_invalid_entries_by_value(entry: int, bad: int) -> None:
    assert invalid_entries(np.array([entry], np.uint64)) == bad


def test_invalid_entries_counts_past_one_piece() -> None:
    entries = np.full(200_001, 3, np.uint64)
    entries[[0, 70_000, 200_000]] = 2**64 - 1
    assert invalid_entries(entries) == 3


def random_rows(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths.tolist():
        # coarse logprobs, so that ties are decided by id; zeros must come first
        logprobs = np.round(-rng.exponential(2, length))
        rows.append(pack_entries(rng.permutation(length * 3)[:length], logprobs).tolist())
    return rows


@pytest.mark.parametrize("in_place", [False, True])
def test_canonical_order_sorts_each_row_as_unsigned(in_place: bool) -> None:
    lengths = np.random.default_rng(1).integers(0, 130, 700)
    lengths[::9] = 0
    lengths[[3, 400]] = 5_000
    rows = random_rows(lengths, 2)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    entries = np.array([entry for row in rows for entry in row], np.uint64)
    before = entries.copy()
    out = canonical_order(entries, offsets, in_place=in_place)
    assert out.tolist() == [entry for row in rows for entry in sorted(row)]
    assert np.array_equal(entries, out if in_place else before)
    assert canonical_order(out, offsets) is out


def test_canonical_order_puts_certain_tokens_first() -> None:
    # a signed sort would put the bare id last
    entries = pack_entries([9, 4, 4, 2], [-0.25, -0.25, 0.0, -7.0])
    ids, logprobs = unpack_entries(canonical_order(entries, np.array([0, 4])))
    assert ids.tolist() == [4, 4, 9, 2]
    assert logprobs.tolist() == [0.0, -0.25, -0.25, -7.0]


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 3], [3, 0, 0], [1, 1, 1]])
def test_canonical_order_with_empty_rows(lengths: list[int]) -> None:
    rows = random_rows(np.array(lengths, np.int64), 3)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    entries = np.array([entry for row in rows for entry in row], np.uint64)
    assert canonical_order(entries, offsets).tolist() == [e for row in rows for e in sorted(row)]


@pytest.mark.parametrize("border", [-1, 0, 1])
def test_order_is_seen_across_the_pieces_it_is_looked_at_in(border: int) -> None:
    """A row that falls only from one piece to the next is sorted; two rows there are left alone."""
    piece = 1 << 15
    entries = np.arange(2 * piece + 5, dtype=np.uint64)
    cut = piece + border
    entries[:cut] += np.uint64(10 * piece)
    two = np.array([0, cut, entries.size], np.int64)
    assert canonical_order(entries, two) is entries
    one = np.array([0, entries.size], np.int64)
    assert canonical_order(entries, one).tolist() == sorted(entries.tolist())
