"""Top-k and top-p in float64 from the rule, steps that are cut on the device, and their check.

Sums on the device are float32, so a mass decides only down to `MASS_TOLERANCE`: of what a step
stored, the ids must be a prefix of the row's order, and the prefix must be as long as the rule
makes it for some p within the tolerance. Everything else is checked given the stored ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from noise import add_noise, noise_of
from oracle_capture import KEPT, OVERFLOW, SKIP, Row, allowed_error, log_softmax, poison, read_rows

from rollout.kernels.support_capture import StepOutput, capture_step
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.token_draw import TokenDraw

MASS_TOLERANCE = 2e-6
"""Of a p, relative to the mass of what top_k keeps."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

_SEEDS = [5, -9, 2**40 + 3, 0, -(2**63)]
_OUTPUT_POSITION = 2
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class CutStep:
    """The N rows of a step and how they are drawn."""

    logits: torch.Tensor
    """[N, V] on `DEVICE`."""
    top_k: list[int]
    top_p: list[float]
    kinds: list[int]
    requests: list[int]
    """Whose the rows are: the noise goes by it."""

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        cuts: list[tuple[int, float]],
        *,
        kinds: list[int] | None = None,
        requests: list[int] | None = None,
    ) -> CutStep:
        """Make a step.

        Args:
            logits: [N, V].
            cuts: top_k and top_p of the rows; they start over where there are more rows.
            kinds: of the rows; all KEPT if None.
            requests: whose the rows are; 0, 1, ... if None.

        Returns:
            The step, of the logits on `DEVICE`.
        """
        n = logits.shape[0]
        of_rows = [cuts[i % len(cuts)] for i in range(n)]
        return cls(
            # a view stays one where it is there already
            logits=logits.to(DEVICE),
            top_k=[k for k, _ in of_rows],
            top_p=[p for _, p in of_rows],
            kinds=kinds or [KEPT] * n,
            requests=list(range(n)) if requests is None else requests,
        )

    def noise(self) -> np.ndarray:
        """Return the noise of all ids, [N, V] float32."""
        seeds = [_seed(request) for request in self.requests]
        positions = [_position(request) for request in self.requests]
        return np.asarray(noise_of(seeds, positions, self.logits.shape[1]).cpu().numpy())

    def values(self) -> np.ndarray:
        """Return the logits, [N, V] float32."""
        return np.asarray(self.logits.float().cpu().numpy())


def _seed(request: int) -> int:
    return _SEEDS[request % len(_SEEDS)] + request


def _position(request: int) -> int:
    return 70_001 * request + 3


def run_step(
    step: CutStep,
    *,
    cut: bool = True,
    capacity: int | None = None,
    spare_rows: int = 2,
    top: int = 0,
    out: StepOutput | None = None,
) -> tuple[list[int], list[Row], StepOutput]:
    """Run a step of more rows than logits; the spare ones are SKIP rows that have cuts too.

    Args:
        step: the rows.
        cut: False to leave the cuts out.
        capacity: entries; all of the logits and 5 more if None.
        spare_rows: rows beyond N.
        top: ids of a TOP row.
        out: buffers, as the last step left them; new ones that are poisoned if None.

    Returns:
        tokens: of all rows.
        rows: what was recorded of N rows.
        out: the buffers.
    """
    n, vocab = step.logits.shape
    if out is None:
        out = StepOutput.allocate(
            max_rows=n + spare_rows,
            vocab_size=vocab,
            capacity=step.logits.numel() + 5 if capacity is None else capacity,
            top=top,
            draws=0,
            device=DEVICE,
        )
        poison(out)
        for scores in (out.scratch.best_score, out.scratch.chunk_best):
            scores.fill_(2**63 - 1)
        out.sampled_ids.fill_(-77)
    spare = [0] * spare_rows
    requests = step.requests + spare

    def of_rows(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    capture_step(
        step.logits,
        out.sampled_ids[: n + spare_rows],
        of_rows(step.kinds + [SKIP] * spare_rows, torch.int8),
        out,
        top=top,
        draws=0,
        seeds=of_rows(requests),
        positions=of_rows([_OUTPUT_POSITION] * (n + spare_rows)),
        draw=TokenDraw(
            add_noise=add_noise,
            seeds=of_rows([_seed(request) for request in requests]),
            lead=of_rows([_position(request) - _OUTPUT_POSITION for request in requests]),
            untruncated=not {KEPT, SKIP}.issuperset(step.kinds),
            cut=SupportCut(
                top_k=of_rows(step.top_k + [1] * spare_rows, torch.int32),
                top_p=torch.tensor(step.top_p + [0.5] * spare_rows, device=DEVICE),
            )
            if cut
            else None,
        ),
        impl="triton",
    )
    return out.sampled_ids.tolist(), read_rows(out, n), out


def allowed_cut(values: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, int, int]:
    """Cut one row by the rule.

    Args:
        values: [V] float, some finite, no NaN or +inf.
        top_k: 0 for none.
        top_p: as float32.

    Returns:
        order: the finite ids, the most probable first, of equal ones the lowest.
        shortest: the fewest of them that may be kept.
        longest: the most of them that may be kept.
    """
    exact = values.astype(np.float64)
    order = np.lexsort((np.arange(exact.size), -exact))
    order = order[: np.count_nonzero(exact > -np.inf)]
    limit = order.size if top_k == 0 else min(top_k, order.size)
    p = float(np.float32(top_p))
    if p == 1.0:
        return order, limit, limit
    weights = np.exp(exact[order[:limit]] - exact[order[0]])
    mass = np.cumsum(weights)
    before = np.concatenate([[0.0], mass[:-1]]) / mass[-1]
    shortest = int(np.count_nonzero(before < p - MASS_TOLERANCE))
    longest = int(np.count_nonzero(before <= p + MASS_TOLERANCE))
    return order, max(shortest, 1), longest


def check_row(
    row: Row, token: int, values: np.ndarray, noise: np.ndarray, top_k: int, top_p: float
) -> None:
    """Compare a KEPT row with float64 and with the noise over what was kept.

    Args:
        row: as recorded.
        token: that was drawn.
        values: [V] float32, the row's logits.
        noise: [V] float32.
        top_k: of the row.
        top_p: of the row.
    """
    order, shortest, longest = allowed_cut(values, top_k, top_p)
    assert shortest <= row.count <= longest, (top_k, top_p, row.count, shortest, longest)
    ids = np.sort(order[: row.count])
    exact = log_softmax(torch.from_numpy(values[ids]))
    # the first of equal sums is the lowest id
    place = int(np.argmax(values[ids] + noise[ids]))
    assert token == ids[place]
    assert row.tail == 0.0
    _check_logprobs(np.array([row.sampled]), exact[[place]])
    if row.flags & OVERFLOW:
        return
    assert row.flags == 0
    assert row.ids == ids.tolist()
    _check_logprobs(row.logprobs, exact)
    assert np.float32(row.sampled).tobytes() == row.logprobs[place].tobytes()


def _check_logprobs(found: np.ndarray, exact: np.ndarray) -> None:
    near = np.abs(found.astype(np.float64) - exact) <= allowed_error(exact)
    # float32 has no number for logprobs of logits 6e38 apart
    near |= (found == -np.inf) & (exact < -_LARGEST)
    assert near.all(), (found[~near][:5], exact[~near][:5])


def check_step(step: CutStep, tokens: list[int], rows: list[Row], out: StepOutput) -> None:
    """Compare the KEPT rows of a step, none of them broken, and what a step leaves alone.

    Args:
        step: the rows.
        tokens: of all rows.
        rows: what was recorded.
        out: the buffers, poisoned before the step.
    """
    check_rows(step, tokens, rows)
    spare = out.offsets.shape[0] - 1 - len(rows)
    end = int(out.offsets[len(rows)])
    assert out.offsets[len(rows) :].tolist() == [end] * (spare + 1)
    assert tokens[len(rows) :] == [0] * spare
    assert (out.entries[end:] == -77).all()


def check_rows(step: CutStep, tokens: list[int], rows: list[Row]) -> None:
    """Compare the KEPT rows of a step, none of them broken.

    Args:
        step: the rows.
        tokens: of all rows.
        rows: what was recorded.
    """
    values, noise = step.values(), step.noise()
    for i, row in enumerate(rows):
        if step.kinds[i] == KEPT:
            check_row(row, tokens[i], values[i], noise[i], step.top_k[i], step.top_p[i])
