"""Which rollouts may reach a file."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from synthetic import make_row, realistic_rows

from rollout.rows import BadRowError, RolloutRow, check_row
from rollout.schema.entries import pack_entries


@pytest.mark.parametrize("kind", ["kept", "top", "none"])
@pytest.mark.parametrize("draws", [0, 3])
def test_good_rows_pass(kind: str, draws: int) -> None:
    check_row(make_row(kind=kind, draws=draws))


def test_realistic_rows_pass() -> None:
    for row in realistic_rows(2):
        check_row(row)


def test_negative_zero_of_the_sampler_is_the_zero_of_the_support() -> None:
    row = make_row(lengths=[1, 1])
    row.sampled_logprobs = np.array([-0.0, 0.0], np.float32)
    check_row(row)


def test_top_row_need_not_list_its_sampled_token() -> None:
    row = make_row(kind="top", lengths=[3])
    row.token_ids = np.array([151_935], np.int32)
    check_row(row)


def set_at(name: str, index: int, value: Any) -> Callable[[RolloutRow], None]:
    def change(row: RolloutRow) -> None:
        getattr(row, name)[index] = value

    return change


def set_field(name: str, value: Any) -> Callable[[RolloutRow], None]:
    return lambda row: setattr(row, name, value)


def repeat_sampled(row: RolloutRow) -> None:
    assert row.support_entries is not None
    row.support_entries[2] = row.support_entries[1]
    row.token_ids[1] = int(row.support_entries[1]) & 0x7FFFFFFF


BAD = {
    "nan logprob": ("bad_numerics", set_at("sampled_logprobs", 1, np.nan)),
    "positive logprob": ("bad_numerics", set_at("sampled_logprobs", 1, 1e-3)),
    "minus infinity": ("bad_numerics", set_at("sampled_logprobs", 1, -np.inf)),
    "nan in support": ("bad_numerics", set_at("support_entries", 1, 0x7FC00000 << 32)),
    "negative zero in support": ("bad_numerics", set_at("support_entries", 0, 0x80000000 << 32)),
    "nan in draws": ("bad_numerics", set_at("draw_entries", 1, 0x7FC00000 << 32)),
    "logprob off by a bit": ("sampled_logprob_mismatch", set_at("sampled_logprobs", 0, -1e-45)),
    "sampled elsewhere": ("sampled_not_in_support", set_at("token_ids", 1, 151_936)),
    "sampled twice": ("sampled_twice_in_support", repeat_sampled),
    "negative id": ("bad_token_id", set_at("token_ids", 0, -1)),
    "negative prompt id": ("bad_token_id", set_at("prompt_token_ids", 0, -5)),
    "offsets from 1": ("bad_offsets", set_at("support_offsets", 0, 1)),
    "offsets fall": ("bad_offsets", set_at("support_offsets", 1, 10)),
    "offsets past the end": ("bad_offsets", set_at("support_offsets", 4, 48)),
    "empty row": ("empty_support", set_at("support_offsets", 1, 0)),
    "short logprobs": ("length_mismatch", set_field("sampled_logprobs", np.zeros(3, np.float32))),
    "short offsets": ("length_mismatch", set_field("support_offsets", np.arange(3))),
    "uneven draws": ("length_mismatch", set_field("draw_entries", pack_entries([1], [-1.0]))),
    "float64": ("bad_dtype", set_field("sampled_logprobs", np.zeros(4))),
    "uint32 ids": ("bad_dtype", set_field("token_ids", np.zeros(4, np.uint32))),
    "no support": ("missing_support", set_field("support_entries", None)),
    "tail of a kept row": ("bad_tail_mass", set_field("tail_mass", np.full(4, 0.1, np.float32))),
    "kind": ("bad_support_kind", set_field("support_kind", "all")),
    "none with support": ("unexpected_support", set_field("support_kind", "none")),
    "temperature": ("bad_temperature", set_field("temperature", float("nan"))),
    "reward": ("nonfinite_reward", set_field("reward", float("nan"))),
    "advantage": ("nonfinite_advantage", set_field("advantage", float("inf"))),
    "no tokens": ("no_tokens", set_field("token_ids", np.empty(0, np.int32))),
}


@pytest.mark.parametrize(("reason", "change"), BAD.values(), ids=BAD.keys())
def test_bad_rows_are_named(reason: str, change: Callable[[RolloutRow], None]) -> None:
    row = make_row(draws=2)
    check_row(row)
    change(row)
    with pytest.raises(BadRowError) as caught:
        check_row(row)
    assert caught.value.reason == reason
    assert caught.value.detail


WIDE = [40_000, 3, 70_000, 1, 1, 33_000, 9]


@pytest.mark.parametrize("token", range(len(WIDE)))
def test_faults_are_seen_in_every_part_of_a_wide_row(token: int) -> None:
    """What is checked in pieces is checked in all of them, and named by its token."""
    row = make_row(lengths=WIDE)
    check_row(row)
    assert row.support_entries is not None
    assert row.support_offsets is not None
    right, last = row.support_entries, int(row.support_offsets[token + 1]) - 1
    row.support_entries = right.copy()
    row.support_entries[last] = 0x7FC00000 << 32
    with pytest.raises(BadRowError, match=r"^bad_numerics: 1 of 143014 support_entries"):
        check_row(row)
    row.support_entries, tokens = right, row.token_ids
    row.token_ids = tokens.copy()
    row.token_ids[token] = 151_936
    with pytest.raises(BadRowError, match=rf"token {token} .id 151936. is in its support 0 times"):
        check_row(row)
    row.token_ids, logprobs = tokens, row.sampled_logprobs
    row.sampled_logprobs = np.nextafter(logprobs, np.float32(-9))
    row.sampled_logprobs[:token] = logprobs[:token]
    with pytest.raises(BadRowError, match=f"sampled_logprob_mismatch: token {token}: "):
        check_row(row)
    row.sampled_logprobs = logprobs
    row.support_entries = right.copy()
    if WIDE[token] > 1:
        heaviest = int(np.argmin(right[row.support_offsets[token] : last + 1]))
        at = int(row.support_offsets[token]) + heaviest
        # twice as probable, unless that is what was sampled
        if (int(right[at]) & 0x7FFFFFFF) != tokens[token]:
            row.support_entries[at] = right[at] & 0xFFFFFFFF
            with pytest.raises(BadRowError, match=f"support_not_normalised: token {token}: "):
                check_row(row)


@pytest.mark.parametrize(("factor", "good"), [(1 + 5e-6, True), (1 + 3e-5, False)])
def test_kept_mass_must_be_one(factor: float, good: bool) -> None:
    ids = np.arange(1000)
    logprobs = np.full(1000, np.log(factor / 1000), np.float32)
    row = make_row(lengths=[1000])
    row.support_entries = pack_entries(ids, logprobs)
    row.token_ids = np.array([17], np.int32)
    row.sampled_logprobs = logprobs[:1]
    if good:
        check_row(row)
    else:
        with pytest.raises(BadRowError, match="support_not_normalised"):
            check_row(row)


@pytest.mark.parametrize("value", [np.nan, -0.1, 1.1])
def test_tail_mass_is_a_probability(value: float) -> None:
    row = make_row(kind="top")
    assert row.tail_mass is not None
    row.tail_mass[2] = value
    with pytest.raises(BadRowError, match="bad_tail_mass"):
        check_row(row)


def test_top_row_needs_a_tail_mass() -> None:
    with pytest.raises(BadRowError, match="missing_tail_mass"):
        check_row(make_row(kind="top", tail_mass=None))
