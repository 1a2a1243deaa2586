"""Entries stay in the spool as long as somebody needs them, and no longer."""

from pathlib import Path

import numpy as np
import pytest
from assemble_cases import PAIR, block, feed, needed, open_spool, pack, row, spooled, take
from waiting import open_below

from rollout import spool
from rollout.assemble import Assembler, CapturedTokens
from rollout.capture.request import SKIP
from rollout.spool_entries import SEGMENT_BITS, HeldSegments, load_entries, segment_name


@pytest.fixture(autouse=True)
def spool_of_the_test(tmp_path: Path) -> None:
    """Give every test a spool."""
    open_spool(tmp_path)


def test_bytes_are_counted_and_the_widest_is_found() -> None:
    assembler = Assembler(capacity=100)
    assert (needed(), assembler.widest()) == (0, None)
    wide = [(i, -1.0) for i in range(5)]
    feed(assembler, block(row("a", 0, 1, entries=wide), row("b", 0, 2, entries=PAIR)))
    assert (needed(), assembler.widest()) == (56, "a")
    feed(assembler, block(row("a", 0, 1), row("b", 1, 2)))  # the first replaces five by one
    assert (needed(), assembler.widest()) == (32, "b")
    assembler.close("b")
    assert (needed(), assembler.widest()) == (8, "a")
    take(assembler, "a", 1)
    assert (needed(), assembler.widest()) == (0, None)


def test_a_segment_goes_when_nobody_needs_it_any_more(tmp_path: Path) -> None:
    def segments() -> int:
        return len(list(tmp_path.iterdir())) - 1  # the writer's own stays

    assembler = Assembler(capacity=100)
    bad = row("bad", 0, 1, flags=spool.FLAG_EMPTY, entries=[])
    feed(assembler, block(row("a", 0, 1), row("b", 0, 2)), block(row("b", 1, 3)), block(bad))
    feed(assembler, block(row("late", 0, 1, kind=SKIP)), block())
    assert segments() == 2  # neither the flagged nor the discarded row holds one
    result = assembler.take("b", np.array([2, 3], np.int32))
    assert isinstance(result, CapturedTokens)
    assert result.entries is not None
    assert segments() == 2  # the entries are the caller's, and still to be written
    result.entries.release()
    assert segments() == 1
    assembler.close("a")
    assert segments() == 0
    with pytest.raises(AssertionError, match="are released twice"):
        result.entries.release()


def test_few_long_requests_do_not_hold_everything_sampled_beside_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    assembler = Assembler(capacity=100)
    entries: dict[str, list[int]] = {"long": [], "other": []}
    wide = 40  # entries of the short requests, 7 and 3 of the long ones
    for step in range(30):
        rows = [row(f"short-{step}", 0, 1, entries=[(i, -1.0) for i in range(wide)])]
        for name, count in (("long", 7), ("other", 3)):
            pairs = [(int(i), -float(rng.random())) for i in rng.permutation(99)[:count]]
            entries[name] += pack(pairs).tolist()
            rows.insert(step % 2, row(name, step, 5, entries=pairs))
        feed(assembler, block(*rows))
        take(assembler, f"short-{step}", 1)
    feed(assembler, block())
    segments = spooled()
    before = segments.num_bytes
    assembler.compact(segments)
    held = 30 * 10 * 8
    assert needed() == held
    assert segments.num_bytes == held < before / 4
    assembler.compact(segments)  # nothing is sparse any more
    assert segments.num_bytes == held
    for name in ("other", "long"):
        found = take(assembler, name, *[5] * 30)
        assert found.support_entries is not None
        assert found.support_entries.tolist() == entries[name]
    assert (needed(), segments.num_bytes) == (0, 0)
    assert len(list(tmp_path.iterdir())) == 1


def test_entries_of_a_segment_that_is_cut_short_are_an_error(tmp_path: Path) -> None:
    assembler = Assembler(capacity=100)
    feed(assembler, block(row("a", 0, 1, entries=PAIR)))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(OSError, match=r"a segment ends at byte \d+, before its entries do"):
        take(assembler, "a", 1)


@pytest.mark.parametrize(("width", "within"), [(3, 1000), (3, 200_000), (600, 200_000)])
def test_entries_are_read_in_the_order_asked_for(tmp_path: Path, width: int, within: int) -> None:
    """Narrow tokens are read together with what lies between them, wide ones one by one."""
    rng = np.random.default_rng(width)
    segments = [rng.integers(0, 2**63, 200_000).astype(np.uint64) for _ in range(3)]
    for index, segment in enumerate(segments):
        (tmp_path / segment_name(index + 7)).write_bytes(segment.tobytes())
    number = 120
    places = 2 * width * rng.choice(within // (2 * width), number, replace=False)
    counts = rng.integers(0, 2 * width + 1, number).astype(np.int32)
    which = rng.integers(0, 3, number)
    expected = [
        segments[s][p : p + n].tolist()
        for s, p, n in zip(which.tolist(), places.tolist(), counts.tolist(), strict=True)
    ]
    addresses = ((which + 7).astype(np.int64) << SEGMENT_BITS) + 8 * places
    found = load_entries(tmp_path, addresses, counts)
    assert found.tolist() == [entry for part in expected for entry in part]


def put(folder: Path, *segments: list[int]) -> None:
    """Write segments of these entries, numbered from 0."""
    for index, entries in enumerate(segments):
        (folder / segment_name(index)).write_bytes(np.array(entries, np.uint64).tobytes())


def test_a_token_without_entries_needs_no_segment(tmp_path: Path) -> None:
    put(tmp_path, [1, 2, 3])
    gone = 9 << SEGMENT_BITS
    for counts in ([0, 2, 0], [0, 0, 0]):
        found = load_entries(tmp_path, np.array([gone, 8, gone]), np.array(counts, np.int32))
        assert found.tolist() == [2, 3][: sum(counts)]


def test_segments_are_closed_again(tmp_path: Path) -> None:
    put(tmp_path, list(range(600)), [7])
    before = open_below(tmp_path)  # what writes them
    for width in (2, 600):  # read together, and each by itself
        addresses = np.array([0, 1 << SEGMENT_BITS])
        found = load_entries(tmp_path, addresses, np.array([width, 1], np.int32))
        assert found.tolist() == [*range(width), 7]
    with pytest.raises(OSError, match="a segment ends"):
        load_entries(tmp_path, np.array([8]), np.array([600], np.int32))
    assert open_below(tmp_path) == before


def test_what_the_disk_does_not_take_is_not_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, [1, 2, 3, 4])
    segments = HeldSegments(tmp_path)
    segments.hold(0, 16)
    segments.seal(0, 32)
    assert segments.sparse(0.6) == [0]
    stock = Path.write_bytes

    def full(path: Path, data: memoryview) -> int:
        stock(path, bytes(data)[:8])
        raise OSError(28, "No space left on device")

    addresses, counts = np.array([8]), np.array([2], np.int32)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            segments.move(addresses, counts)
    assert [path.name for path in tmp_path.iterdir()] == [segment_name(0)]
    assert load_entries(tmp_path, addresses, counts).tolist() == [2, 3]
    assert segments.num_bytes == 32
    moved = segments.move(addresses, counts)
    assert load_entries(tmp_path, moved, counts).tolist() == [2, 3]
    assert segments.num_bytes == 16
    assert not (tmp_path / segment_name(0)).exists()


def test_a_folder_that_is_gone_with_the_job_is_no_error(tmp_path: Path) -> None:
    put(tmp_path, [1, 2])
    segments = HeldSegments(tmp_path)
    segments.hold(0, 16)
    segments.seal(0, 16)
    (tmp_path / segment_name(0)).unlink()
    segments.release(np.array([0]), np.array([2], np.int32))
    assert segments.num_bytes == 0
