"""Steps that stand for all real ones: whoever has launched these has compiled every kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollout.capture.batch import BatchRows, RowCut, RowNoise
from rollout.capture.request import KEPT, SKIP


def warm_steps(num_rows: int, *, draws_tokens: bool, truncates: bool) -> list[BatchRows]:
    """Return the rows of a step for each way of launching one.

    Args:
        num_rows: rows of each step, N.
        draws_tokens: whether there may be steps whose tokens are drawn.
        truncates: whether those may be truncated.

    Returns:
        Steps whose tokens are given, then those with `noise`, whose tokens are to be drawn.
    """
    zeros = np.zeros(num_rows, np.int64)
    every_kind = (np.arange(num_rows) % 5).astype(np.int8)
    given = BatchRows(
        request_ids=[""] * num_rows,
        positions=zeros.astype(np.int32),
        kinds=every_kind,
        seeds=zeros,
    )
    steps = [given]
    if not draws_tokens:
        return steps
    top_k, top_p = np.full(num_rows, 9, np.int32), np.full(num_rows, 0.9, np.float32)
    for cut in (None, RowCut(top_k=top_k, top_p=top_p)) if truncates else (None,):
        for kinds in (every_kind, np.where(every_kind == KEPT, KEPT, SKIP).astype(np.int8)):
            noise = RowNoise(seeds=zeros, lead=zeros, untruncated=kinds is every_kind, cut=cut)
            steps.append(replace(given, kinds=kinds, noise=noise))
    return steps
