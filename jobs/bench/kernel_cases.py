"""The steps by which the capture kernels are timed: their logits and their buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from noise_scores import add_gumbel

from rollout.kernels.support_capture import RowKind, StepOutput, capture_step
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.token_draw import TokenDraw

ROWS = 512
VOCAB = 151_936
SETS = 4  # of logits, 1.2 GB in fp32: 20 times the L2 of an H200
SEED = 20260101
SPREADS = {8: 9.0, 174: 5.2, 4_000: 3.62, 55_000: 2.0}
"""Standard deviation of normal logits, by the ids that top-p .95 keeps of a row on average."""

# N rows, V vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload: what the rows record and how much of the vocabulary is kept."""

    name: str
    dtype: torch.dtype
    kind: RowKind
    kept: int
    """Ids that the logits leave in `ROWS` rows of `VOCAB` ids together; the others are -inf."""
    spread: float = 3.0
    """Standard deviation of the logits."""
    top: int = 0
    draws: int = 0
    draw_token: bool = False
    """Whether the step draws its tokens itself."""
    cut: tuple[int, float] | None = None
    """top_k and top_p by which the step truncates before it draws; null if it does not."""
    capacity: int = 1 << 24
    goal_ms: float | None = None


def _cut(
    mean: int, top_k: int = 0, dtype: torch.dtype = torch.float32, capacity: int = 1 << 24
) -> Case:
    """Return the case that truncates logits of which top-p .95 keeps `mean` ids of a row."""
    name = f"{'bf16' if dtype == torch.bfloat16 else 'fp32'} cut at .95, mean {mean:,}"
    return Case(
        name=f"{name}, top-k {top_k}" if top_k else name,
        dtype=dtype,
        kind=RowKind.KEPT,
        kept=ALL,
        spread=SPREADS[mean],
        draw_token=True,
        cut=(top_k, 0.95),
        capacity=capacity,
    )


ALL = ROWS * VOCAB
FP32, BF16 = torch.float32, torch.bfloat16
KEPT, TOP, NONE = RowKind.KEPT, RowKind.TOP, RowKind.NONE
CASES = (
    Case(name="fp32 kept 89 k", dtype=FP32, kind=KEPT, kept=89_000, goal_ms=0.12),
    Case(name="fp32 kept 2.2 M", dtype=FP32, kind=KEPT, kept=2_200_000),
    Case(name="fp32 kept 9.3 M", dtype=FP32, kind=KEPT, kept=9_300_000, goal_ms=0.17),
    Case(name="fp32 kept 89 k, token drawn", dtype=FP32, kind=KEPT, kept=89_000, draw_token=True),
    Case(
        name="fp32 kept 9.3 M, token drawn", dtype=FP32, kind=KEPT, kept=9_300_000, draw_token=True
    ),
    Case(name="fp32 kept 89 k, 8 draws", dtype=FP32, kind=KEPT, kept=89_000, draws=8),
    _cut(8),
    _cut(174),
    _cut(4_000),
    _cut(55_000, capacity=1 << 25),
    _cut(174, top_k=128),
    _cut(174, top_k=20),
    Case(name="fp32 top 128", dtype=FP32, kind=TOP, kept=ALL, top=128),
    Case(name="fp32 top 128, 8 draws", dtype=FP32, kind=TOP, kept=ALL, top=128, draws=8),
    Case(name="fp32 none", dtype=FP32, kind=NONE, kept=ALL),
    Case(name="fp32 none, 8 draws", dtype=FP32, kind=NONE, kept=ALL, draws=8),
    Case(name="bf16 kept 89 k", dtype=BF16, kind=KEPT, kept=89_000),
    Case(name="bf16 kept 9.3 M", dtype=BF16, kind=KEPT, kept=9_300_000),
    _cut(174, dtype=BF16),
    Case(name="bf16 top 128", dtype=BF16, kind=TOP, kept=ALL, top=128),
    Case(name="bf16 top 128, 8 draws", dtype=BF16, kind=TOP, kept=ALL, top=128, draws=8),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseStep:
    """What the steps of a case run on."""

    case: Case
    sets: list[torch.Tensor]
    """Of logits, each [N, V]."""
    sampled: list[torch.Tensor]
    """Of each set [N] int64, kept ids; the draw writes others of its own."""
    kinds: torch.Tensor
    """[N] int8."""
    seeds: torch.Tensor
    """[N] int64."""
    positions: torch.Tensor
    """[N] int64."""
    draw: TokenDraw | None
    out: StepOutput

    @classmethod
    def make(
        cls, case: Case, device: torch.device, *, rows: int = ROWS, vocab_size: int = VOCAB
    ) -> CaseStep:
        """Make the logits and the buffers of a case.

        Args:
            case: the workload.
            device: where to.
            rows: N.
            vocab_size: V.
        """
        sets = [make_logits(case, device, SEED + i, rows, vocab_size) for i in range(SETS)]
        seeds = torch.arange(rows, device=device) + SEED
        draw = None
        if case.draw_token:
            draw = TokenDraw(
                add_noise=add_gumbel,
                seeds=seeds,
                lead=seeds,
                untruncated=case.kind != RowKind.KEPT,
                cut=None if case.cut is None else make_cut(*case.cut, rows, device),
            )
        return cls(
            case=case,
            sets=[logits for logits, _ in sets],
            sampled=[sampled for _, sampled in sets],
            kinds=torch.full((rows,), int(case.kind), dtype=torch.int8, device=device),
            seeds=seeds,
            positions=torch.arange(rows, device=device),
            draw=draw,
            out=StepOutput.allocate(
                max_rows=rows,
                vocab_size=vocab_size,
                capacity=case.capacity,
                top=case.top,
                draws=case.draws,
                device=device,
            ),
        )

    def run(self, index: int) -> None:
        """Launch one step.

        Args:
            index: its number; it takes the sets of logits in turn.
        """
        capture_step(
            self.sets[index % SETS],
            self.tokens(index),
            self.kinds,
            self.out,
            top=self.case.top,
            draws=self.case.draws,
            seeds=self.seeds,
            positions=self.positions,
            draw=self.draw,
        )

    def tokens(self, index: int) -> torch.Tensor:
        """Return the tokens of a step, [N] int64, where it draws them or takes them from.

        Args:
            index: its number.
        """
        return self.sampled[index % SETS] if self.draw is None else self.out.sampled_ids

    def poison(self) -> None:
        """Overwrite what the last step left, so that nothing passes that the next does not write.

        The steps' own scratch stays: it is not cleared between steps either.
        """
        out = self.out
        for buffer in (out.entries, out.counts, out.offsets, out.draws, out.sampled_ids, out.flags):
            buffer.fill_(-7)
        for buffer in (out.sampled_logprobs, out.tail_mass):
            buffer.fill_(torch.nan)


def make_logits(
    case: Case, device: torch.device, seed: int, rows: int, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one set of logits.

    Args:
        case: the workload.
        device: where to.
        seed: of the random numbers.
        rows: N.
        vocab_size: V.

    Returns:
        logits: [N, V].
        sampled_ids: [N] int64, kept ids.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (rows, vocab_size)
    logits = torch.randn(shape, generator=generator, device=device) * case.spread
    if case.kept < ALL:
        dropped = torch.rand(shape, generator=generator, device=device)
        gone = dropped >= case.kept / ALL
        gone[:, 0] &= ~gone.all(dim=1)  # short rows are left an id
        logits[gone] = -torch.inf
    sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).flatten()
    return logits.to(case.dtype), sampled


def make_cut(top_k: int, top_p: float, rows: int, device: torch.device) -> SupportCut:
    """Truncate all rows alike.

    Args:
        top_k: 0 for none.
        top_p: 1 for none.
        rows: N.
        device: where to.
    """
    return SupportCut(
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=device),
        top_p=torch.full((rows,), top_p, dtype=torch.float32, device=device),
    )
