"""The recorded draws of a seeded job on the real engine: from q, and not from the sampled token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_jobs import make_job, read_rows, seen_logits, unpack, write_prompts
from tiny_model import make_tiny_model

from rollout.pipeline import generate

pytestmark = pytest.mark.engine

FALSE_ALARM = 1e-6  # of each of the two tests
ROLLOUTS = 1500
DRAWS = 2
CELLS = 6  # the most probable ids, and the rest


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with `degrees` degrees of freedom >= statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_draws_follow_q_and_are_independent_of_the_sampled_token(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", logit_scale=2.5)
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": "a", "prompt": "a"}])
    job = make_job(
        model,
        prompts,
        tmp_path / "out",
        # the seed of a rollout is that of its draws too: only the domain sets them apart
        sampling={"n": ROLLOUTS, "max_tokens": 1, "top_p": 0.9, "seed": 3},
        capture={"draws": DRAWS},
        engine={"max_num_seqs": 128},
    )
    with seen_logits() as seen:
        generate(job, show_progress=False)
    rows = read_rows(tmp_path / "out")
    assert len(rows) == ROLLOUTS
    q = next(iter(seen.rows.values())).double().softmax(-1).numpy()
    best = np.argsort(-q)[: CELLS - 1]
    cell_of = {int(token): cell for cell, token in enumerate(best)}
    expected = np.append(q[best], 1.0 - q[best].sum())
    assert expected.min() > 0.01, "cells too small for a chi-square test"

    sampled = np.array([cell_of.get(row["token_ids"][0], CELLS - 1) for row in rows])
    drawn_ids = np.array([unpack(row["draw_entries"])[0] for row in rows])
    drawn = np.vectorize(lambda token: cell_of.get(int(token), CELLS - 1))(drawn_ids)

    counts = np.bincount(drawn.ravel(), minlength=CELLS)
    goodness = ((counts - ROLLOUTS * DRAWS * expected) ** 2 / (ROLLOUTS * DRAWS * expected)).sum()
    assert chi_square_tail(goodness, CELLS - 1) > FALSE_ALARM

    for k in range(DRAWS):
        table = np.zeros((CELLS, CELLS))
        np.add.at(table, (sampled, drawn[:, k]), 1)
        fit = np.outer(table.sum(1), table.sum(0)) / ROLLOUTS
        statistic = ((table - fit) ** 2 / fit).sum()
        assert chi_square_tail(statistic, (CELLS - 1) ** 2) > FALSE_ALARM
    # the test can fail: the sampled token as its own draw would be found out
    table = np.diag(np.bincount(sampled, minlength=CELLS)).astype(float)
    fit = np.outer(table.sum(1), table.sum(0)) / ROLLOUTS
    assert chi_square_tail(((table - fit) ** 2 / fit).sum(), (CELLS - 1) ** 2) < FALSE_ALARM
    assert math.isclose(chi_square_tail(0.0, 5), 1.0)
