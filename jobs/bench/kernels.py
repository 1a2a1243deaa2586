"""Time the capture kernels against the bytes that they cannot avoid, and check what they wrote.

    python jobs/bench/kernels.py

One CUDA device, torch and triton are all that it needs. The floor of a case is one read of the
logits and one write of the entries at the copy bandwidth measured in the same run. Steps are timed
as CUDA graphs over several sets of logits, so that no step finds its input in the cache; results of
the same buffers are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from rollout.kernels.draws import draw_bits
from rollout.kernels.support_capture import RowKind, StepOutput, capture_step
from rollout.kernels.token_draw import TokenDraw

ROWS = 512
VOCAB = 151_936
SETS = 4  # of logits, 1.2 GB in fp32: 20 times the L2 of an H200
SEED = 20260101


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload: what the rows record and how much of the vocabulary is kept."""

    name: str
    dtype: torch.dtype
    kind: RowKind
    kept: int
    """Ids kept in all rows together."""
    top: int = 0
    draws: int = 0
    draw_token: bool = False
    """Whether the step draws its tokens itself."""
    goal_ms: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was measured of a case."""

    name: str
    entries: int
    median_ms: float
    low_ms: float
    high_ms: float
    floor_ms: float
    goal_ms: float | None
    host_ms: float
    worst_logprob: float
    """Largest error of a logprob over the error that is allowed."""
    worst_tail: float
    """Largest relative error of a tail mass."""


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
    Case(name="fp32 top 128", dtype=FP32, kind=TOP, kept=ALL, top=128),
    Case(name="fp32 top 128, 8 draws", dtype=FP32, kind=TOP, kept=ALL, top=128, draws=8),
    Case(name="fp32 none", dtype=FP32, kind=NONE, kept=ALL),
    Case(name="fp32 none, 8 draws", dtype=FP32, kind=NONE, kept=ALL, draws=8),
    Case(name="bf16 kept 89 k", dtype=BF16, kind=KEPT, kept=89_000),
    Case(name="bf16 kept 9.3 M", dtype=BF16, kind=KEPT, kept=9_300_000),
    Case(name="bf16 top 128", dtype=BF16, kind=TOP, kept=ALL, top=128),
    Case(name="bf16 top 128, 8 draws", dtype=BF16, kind=TOP, kept=ALL, top=128, draws=8),
)


@triton.jit
def add_gumbel(value, ids, seed, position):  # type: ignore[no-untyped-def]
    """Add Gumbel noise of 24 bits, by a hash of seed, position and id as an engine's sampler."""
    word = ids.to(tl.uint32) * 0x9E3779B1 + position.to(tl.uint32) * 0x85EBCA77
    word = (word ^ seed.to(tl.uint32) ^ (seed >> 32).to(tl.uint32)) * 0xC2B2AE3D
    word = (word ^ (word >> 15)) * 0x27D4EB2F
    word = word ^ (word >> 13)
    uniform = ((word >> 8).to(tl.int32).to(tl.float32) + 0.5) * 5.9604644775390625e-08
    return value - tl.log(-tl.log(uniform))


def main() -> None:
    """Run every case and print a table; exit with an error if an output is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=30, help="timed replays of each graph")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    device = torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, triton {triton.__version__}, "
        f"Python {platform.python_version()}"
    )
    bandwidth = copy_bandwidth(device, options.replays)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, bytes read plus bytes written")
    results = [run_case(case, device, bandwidth, options.replays) for case in CASES]
    print(
        f"{'case':<30}{'entries':>10}{'median ms':>11}{'p10-p90':>16}{'floor':>8}{'x floor':>9}"
        f"{'goal':>7}{'host ms':>9}{'logq err':>10}{'tail err':>10}"
    )
    for result in results:
        goal = "" if result.goal_ms is None else f"{result.goal_ms:.2f}"
        print(
            f"{result.name:<30}{result.entries:>10}{result.median_ms:>11.4f}"
            f"{f'{result.low_ms:.4f}-{result.high_ms:.4f}':>16}{result.floor_ms:>8.4f}"
            f"{result.median_ms / result.floor_ms:>9.2f}{goal:>7}{result.host_ms:>9.3f}"
            f"{result.worst_logprob:>10.2f}{result.worst_tail:>10.1e}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)
    wrong = [r.name for r in results if r.worst_logprob > 1.0 or r.worst_tail > 1e-5]
    if wrong:
        raise SystemExit(f"errors above what is allowed in: {', '.join(wrong)}")


def copy_bandwidth(device: torch.device, replays: int) -> float:
    """Measure a large copy.

    Args:
        device: the device.
        replays: timed copies.

    Returns:
        Bytes read plus bytes written per second.
    """
    source = torch.randint(0, 1 << 30, (1 << 28,), device=device)
    target = torch.empty_like(source)
    # by a kernel: a graph gives plain copies to the slower copy engine
    times = time_graph(lambda: torch.neg(source, out=target), 1, replays)
    return 2 * source.numel() * 8 / (statistics.median(times) * 1e-3)


def time_graph(work: Callable[[], object], repeats: int, replays: int) -> list[float]:
    """Time work that waits for nothing, as a CUDA graph.

    Args:
        work: launches everything that is timed, `repeats` steps of it.
        repeats: steps in one call of `work`.
        replays: timed replays.

    Returns:
        Milliseconds of one step, of each replay.
    """
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return times


def make_logits(case: Case, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one set of logits.

    Args:
        case: the workload.
        device: where to.
        seed: of the random numbers.

    Returns:
        logits: [ROWS, VOCAB].
        sampled_ids: [ROWS] int64, kept ids.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (ROWS, VOCAB)
    logits = torch.randn(shape, generator=generator, device=device) * 3.0
    if case.kept < ROWS * VOCAB:
        dropped = torch.rand(shape, generator=generator, device=device)
        logits[dropped >= case.kept / (ROWS * VOCAB)] = -torch.inf
    sampled = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=generator).flatten()
    return logits.to(case.dtype), sampled


def run_case(case: Case, device: torch.device, bandwidth: float, replays: int) -> Result:
    """Time one case and check its output.

    Args:
        case: the workload.
        device: the device.
        bandwidth: bytes per second for the floor.
        replays: timed replays.

    Returns:
        What was measured.
    """
    sets = [make_logits(case, device, SEED + i) for i in range(SETS)]
    kinds = torch.full((ROWS,), int(case.kind), dtype=torch.int8, device=device)
    seeds = torch.arange(ROWS, device=device) + SEED
    positions = torch.arange(ROWS, device=device)
    out = StepOutput.allocate(
        max_rows=ROWS,
        vocab_size=VOCAB,
        capacity=1 << 24,
        top=case.top,
        draws=case.draws,
        device=device,
    )

    draw = None
    if case.draw_token:
        draw = TokenDraw(
            add_noise=add_gumbel, seeds=seeds, lead=seeds, untruncated=case.kind != KEPT
        )

    def step(index: int) -> None:
        logits, sampled = sets[index % SETS]
        capture_step(
            logits,
            out.sampled_ids if case.draw_token else sampled,
            kinds,
            out,
            top=case.top,
            draws=case.draws,
            seeds=seeds,
            positions=positions,
            draw=draw,
        )

    repeats = 3 * SETS

    def steps() -> None:
        for index in range(repeats):
            step(index)

    times = sorted(time_graph(steps, repeats, replays))
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for index in range(20):
        step(index)
    host_ms = (time.perf_counter() - begin) / 20 * 1e3
    torch.cuda.synchronize()

    for buffer in (out.entries, out.counts, out.offsets, out.draws):
        buffer.fill_(-7)
    step(0)
    logits, sampled = sets[0]
    if case.draw_token:
        sampled = out.sampled_ids
    worst_logprob, worst_tail = check(case, logits, sampled, out, seeds, positions)
    entries = int(out.offsets[ROWS])
    size = logits.numel() * logits.element_size() + 8 * (entries + ROWS * case.draws)
    return Result(
        name=case.name,
        entries=entries,
        median_ms=statistics.median(times),
        low_ms=times[len(times) // 10],
        high_ms=times[-1 - len(times) // 10],
        floor_ms=size / bandwidth * 1e3,
        goal_ms=case.goal_ms,
        host_ms=host_ms,
        worst_logprob=worst_logprob,
        worst_tail=worst_tail,
    )


def check(
    case: Case,
    logits: torch.Tensor,
    sampled: torch.Tensor,
    out: StepOutput,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[float, float]:
    """Compare the output of one step with float64.

    Args:
        case: the workload.
        logits: [ROWS, VOCAB].
        sampled: [ROWS] int64.
        out: the filled buffers.
        seeds: [ROWS] int64.
        positions: [ROWS] int64.

    Returns:
        worst_logprob: the largest error of a logprob over 5e-7 + 2**-23 * |logprob|.
        worst_tail: the largest relative error of a tail mass.
    """
    exact = torch.log_softmax(logits.double(), dim=-1)
    expected = head_mask(logits, case.top) if case.kind == RowKind.TOP else logits > -torch.inf
    if case.kind == RowKind.NONE:
        expected = torch.zeros_like(expected)
    same("flags", out.flags, torch.zeros_like(out.flags))
    same("counts", out.counts.long(), expected.sum(dim=1))
    same("offsets", out.offsets[1:], expected.sum(dim=1).cumsum(dim=0))
    total = int(out.offsets[ROWS])
    rows = torch.repeat_interleave(torch.arange(ROWS, device=logits.device), out.counts.long())
    ids, logprobs = unpack(out.entries[:total])
    same("ids", (rows * VOCAB + ids).sort().values, expected.flatten().nonzero().flatten())
    worst = [error_ratio(out.sampled_logprobs, exact.gather(1, sampled[:, None])[:, 0])]
    if total:
        worst.append(error_ratio(logprobs, exact[rows, ids]))
    worst_tail = 0.0
    if case.kind == RowKind.TOP:
        tail = torch.logsumexp(exact.masked_fill(expected, -torch.inf), dim=-1).exp()
        worst_tail = float(((out.tail_mass.double() - tail).abs() / tail).max())
    if case.draws:
        ids, logprobs = unpack(out.draws)
        worst.append(error_ratio(logprobs, exact.gather(1, ids)))
        words = draw_bits(seeds, positions, case.draws)
        uniform = ((words[..., 0] >> 5) * 2.0**26 + (words[..., 1] >> 6)) * 2.0**-53
        cumulative = exact.exp().cumsum(dim=-1)
        upper = cumulative.gather(1, ids)
        lower = upper - exact.exp().gather(1, ids)
        off = torch.maximum(lower - uniform, uniform - upper).max()
        if float(off) > 1e-6:
            raise SystemExit(
                f"{case.name}: a draw is {float(off):.1e} away from its uniform number"
            )
    return max(worst), worst_tail


def head_mask(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Mark the `top` largest of each row, of equal ones the lowest ids.

    Args:
        logits: [N, V].
        top: how many.

    Returns:
        [N, V] bool.
    """
    bound = logits.topk(top, dim=-1).values[:, -1:]
    above = logits > bound
    equal = logits == bound
    spare = top - above.sum(dim=1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=1) <= spare))


def unpack(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Take packed entries apart.

    Args:
        entries: int64, any shape.

    Returns:
        ids: int64.
        logprobs: float32.
    """
    return entries & 0xFFFFFFFF, (entries >> 32).to(torch.int32).view(torch.float32)


def error_ratio(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest error over the error that a logprob may have.

    Args:
        values: float32.
        exact: float64 of the same shape.

    Returns:
        At most 1 if all are right.
    """
    return float(((values.double() - exact).abs() / (5e-7 + 2.0**-23 * exact.abs())).max())


def same(name: str, values: torch.Tensor, expected: torch.Tensor) -> None:
    """Stop unless two integer tensors are equal.

    Args:
        name: what they are.
        values: from the kernels.
        expected: from the formula.
    """
    if not torch.equal(values, expected):
        raise SystemExit(f"{name}: the kernels' differ from what the logits say")


if __name__ == "__main__":
    main()
