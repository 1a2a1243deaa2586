"""What the charts of `rollout report` are drawn from, on axes that note what they are asked."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import polars as pl
import pytest

from rollout.charts import entropy, progress, rewards_by_group
from rollout.report_data import ReportData


def test_the_entropy_of_many_positions_is_the_mean_over_their_tokens() -> None:
    # rollouts of all lengths to 450, so that a bin's positions have unequally many tokens
    lengths = range(1, 451)
    values = {(n, i): ((7 * n + 3 * i) % 50) / 10 for n in lengths for i in range(n)}
    at = range(450)
    data = ReportData(
        surprisal=np.array([sum(values[n, i] for n in range(i + 1, 451)) for i in at]),
        tokens=np.array([450 - i for i in at], np.int64),
    )
    axes = mock.MagicMock()
    entropy(data)(axes)
    starts, means = axes.plot.call_args.args
    assert len(starts) == 200
    for start, end, mean in zip(starts, [*starts[1:], 450], means, strict=True):
        inside = [value for (_, i), value in values.items() if start <= i < end]
        assert mean == pytest.approx(statistics.fmean(inside))


def test_a_run_of_one_part_has_room_around_its_point() -> None:
    record: Any = SimpleNamespace(rows=5, created_at="2026-11-30T07:09:32.846+00:00")
    axes = mock.MagicMock()
    progress([record], planned=8)(axes)
    assert axes.set_xlim.call_args.args == (-1, 1)
    low, high = axes.set_ylim.call_args.args
    assert low == 0
    assert high > 8
    later: Any = SimpleNamespace(rows=7, created_at="2026-11-30T07:11:34.846+00:00")
    axes = mock.MagicMock()
    progress([later, record], planned=8)(axes)
    assert not axes.set_xlim.called
    assert axes.set_ylim.call_args.args[1] > 12
    passed, rows = axes.plot.call_args.args[:2]
    assert passed == [0, pytest.approx(122 / 60)]
    assert list(rows) == [5, 12]
    assert axes.set_xlabel.call_args.args == ("minutes since the first commit",)


def test_many_groups_are_thinned_out_evenly() -> None:
    groups = pl.DataFrame(
        {
            "prompt_id": [f"p{i:04d}" for i in range(1198) for _ in range(2)],
            "reward": [i / 1198 + side for i in range(1198) for side in (-0.5, 0.5)],
        }
    )
    axes = mock.MagicMock()
    rewards_by_group(groups.sample(fraction=1.0, shuffle=True, seed=1))(axes)
    _, low, high = axes.vlines.call_args.args
    # every third, both ends among them
    assert low == pytest.approx([i / 1198 - 0.5 for i in range(0, 1198, 3)])
    assert high - low == pytest.approx(np.ones(len(low)))
    assert "1,198 groups" in axes.set_xlabel.call_args.args[0]
