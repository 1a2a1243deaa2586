"""Time the output heads, forward and backward, and check their gradients against float64.

    python jobs/bench/lm_head.py

One CUDA device, torch and triton are all that it needs. Each case runs our head with replay, and
with replay and exact centering, beside one dense product in bf16 (the floor of any dense head), a
plain PyTorch head with replay, a head in chunks of tokens and ids with a padded mask as RL trainers
have it, and, where they are installed, cut-cross-entropy and liger-kernel, which do a plain
next-token loss and no replay. These rows feed the heads with gradients made by hand; `through
rollout.losses` is ours with the package's own loss, metrics included. `device` is the time on
the stream with all launches queued ahead, as in a trainer whose device is behind its host; `alone`
is one call between two waits, launches included. `peak` is what a call allocates beyond its inputs.
"""

from __future__ import annotations

import argparse
import importlib
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from rollout.kernels.head_config import WIDE_BLOCK_ELEMENTS
from rollout.kernels.support_rows import entry_rows
from rollout.losses import LossConfig, LossInputs, compute_loss

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
from head_batches import (
    CASES,
    TOKENS,
    VOCAB,
    Batch,
    Case,
    make_batch,
    make_plan,
    our_logprobs,
)  # fmt: skip

CHUNK = 8192  # tokens and ids of the chunked head, as its users set it
MAX_MASK_BYTES = 1 << 31  # of a padded mask, beyond which the chunked head is not run
CHECKED_ROWS = 512
LOSS = LossConfig(loss="icepop", centering="exact", check_values=False)
MAX_CENTERING_MS = 0.2  # over replay alone, where a case has a goal

# N tokens, E entries of all tokens, V vocabulary, H hidden size, K widest support


def centering_grads(batch: Batch, logprobs: Tensor) -> Tensor:
    """Return [E] gradients of the exact centering of icepop: A * p where p / q is in the band."""
    log_ratio = logprobs - batch.sampler_logprobs
    inside = (log_ratio >= math.log(0.2)) & (log_ratio <= math.log(5.0))
    weights = batch.advantages[entry_rows(batch.offsets, logprobs.shape[0])]
    return torch.where(inside, logprobs.exp() * weights, 0.0)


def train(batch: Batch, head: Callable[[Batch], tuple[Tensor, Tensor]], *, centering: bool) -> None:
    """Run a head both ways, with the gradients of the policy and, if asked for, the centering."""
    targets, entries = head(batch)
    if centering:
        grads = centering_grads(batch, entries.detach())
        torch.autograd.backward([targets, entries], [-batch.advantages, grads])
    else:
        torch.autograd.backward([targets], [-batch.advantages])


def train_by_loss(batch: Batch) -> None:
    """Run our head both ways with the package's loss, icepop with exact centering."""
    targets, entries = our_logprobs(batch)
    every = torch.ones_like(batch.targets, dtype=torch.bool)
    inputs = LossInputs(
        trainer_logprobs=targets,
        sampler_logprobs=batch.sampler_logprobs[batch.chosen],
        advantages=batch.advantages,
        loss_mask=every,
        temperature=torch.ones_like(batch.advantages),
        support_offsets=batch.offsets,
        trainer_support_logprobs=entries,
        sampler_support_logprobs=batch.sampler_logprobs,
        support_valid=every,
        support_is_samples=~every,
        sampler_tail_mass=torch.zeros_like(batch.advantages),
        global_denominator=float(TOKENS),
    )
    torch.autograd.backward(compute_loss(inputs, LOSS).loss)


def plain_logprobs(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the same by dense logits in plain PyTorch: bf16 products, or float64 throughout."""
    logits = batch.hidden @ batch.weight.T
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    rows = entry_rows(batch.offsets, batch.ids.shape[0])
    entries = logits[rows, batch.ids.long()]
    top = torch.full_like(logits[:, 0], -torch.inf)
    top = top.scatter_reduce(0, rows, entries.detach(), "amax")
    total = torch.zeros_like(top).index_add(0, rows, (entries - top[rows]).exp())
    logsumexp = top + total.log()
    chosen = logits.gather(1, batch.targets[:, None]).squeeze(1)
    return chosen - logsumexp, entries - logsumexp[rows]


def padded_mask(batch: Batch) -> Tensor:
    """Return [N, K] int64 support ids, padded with -1."""
    mask = torch.full((TOKENS, int(batch.offsets.diff().max())), -1, device="cuda")
    mask[torch.arange(mask.shape[1], device="cuda") < batch.offsets.diff()[:, None]] = (
        batch.ids.long()
    )
    return mask


@torch.no_grad()
def chunked_head(batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by a head in chunks: all logits, twice, of which the mask's count."""
    weight = batch.weight
    grad_hidden, grad_weight = torch.empty_like(batch.hidden), torch.zeros_like(weight)
    for tokens in torch.split(torch.arange(TOKENS, device="cuda"), CHUNK):
        hidden, ids, targets = batch.hidden[tokens], mask[tokens], batch.targets[tokens]
        kept = torch.full(ids.shape, -torch.inf, device="cuda")
        chosen = torch.zeros(len(tokens), device="cuda")
        logz = torch.full((len(tokens),), -torch.inf, device="cuda")
        for first in range(0, VOCAB, CHUNK):
            logits = (hidden @ weight[first : first + CHUNK].T).float()
            logz = torch.logaddexp(logz, logits.logsumexp(1))
            for wanted, found in ((ids, kept), (targets[:, None], chosen[:, None])):
                inside = (wanted >= first) & (wanted < first + logits.shape[1])
                picked = logits.gather(1, (wanted - first).clamp(0, logits.shape[1] - 1))
                found.copy_(torch.where(inside, picked, found))
        logsumexp = kept.logsumexp(1)
        weights = -batch.advantages[tokens]
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for first in range(0, VOCAB, CHUNK):
            block = weight[first : first + CHUNK]
            logits = (hidden @ block.T).float()
            inside = (ids >= first) & (ids < first + logits.shape[1])
            place = torch.where(inside, ids - first, 0)
            masked = torch.zeros(logits.shape, dtype=torch.int8, device="cuda")
            masked.scatter_add_(1, place, inside.to(torch.int8))
            logits = logits.masked_fill(masked == 0, -torch.inf)
            grads = (logits - logsumexp[:, None]).exp() * -weights[:, None]
            hit = (targets >= first) & (targets < first + logits.shape[1])
            place = (targets - first).clamp(0, logits.shape[1] - 1)[:, None]
            grads.scatter_add_(1, place, torch.where(hit, weights, 0.0)[:, None])
            grads = grads.bfloat16()
            total += grads @ block
            grad_weight[first : first + CHUNK] += grads.T @ hidden
        grad_hidden[tokens] = total.bfloat16()
    return grad_hidden, grad_weight


def other_heads(batch: Batch) -> dict[str, Callable[[], None] | None]:
    """Return the plain next-token losses of other packages, None where one is not installed."""
    heads: dict[str, Callable[[], None] | None] = {"cut-cross-entropy": None, "liger-kernel": None}
    with suppress(ImportError):
        cce = importlib.import_module("cut_cross_entropy").linear_cross_entropy
        heads["cut-cross-entropy"] = lambda: cce(*arguments).backward()
    with suppress(ImportError):
        liger = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
        function = liger.LigerFusedLinearCrossEntropyFunction
        heads["liger-kernel"] = lambda: function.apply(*arguments)[0].backward()
    arguments = batch.hidden, batch.weight, batch.targets
    return heads


def measure(label: str, batch: Batch, run: Callable[[], object], repeats: int) -> tuple[float, int]:
    """Time a head, print its line, and return the median device ms and the peak in bytes."""
    for _ in range(2):
        batch.hidden.grad = batch.weight.grad = None
        run()
    batch.hidden.grad = batch.weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    alone: list[float] = []
    device: list[float] = []
    for _ in range(repeats):
        batch.hidden.grad = batch.weight.grad = None
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        alone.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() - before
    cuda: Any = torch.cuda
    for _ in range(repeats):
        batch.hidden.grad = batch.weight.grad = None
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        cuda._sleep(20_000_000)  # about 10 ms, in which the host queues the launches
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end))
    batch.hidden.grad = batch.weight.grad = None
    median = statistics.median(device)
    print(
        f"  {label:<44}{median:9.3f} ({min(device):.3f} to {max(device):.3f})"
        f"{statistics.median(alone):10.3f}{peak / 2**30:9.2f}",
        flush=True,
    )
    return median, peak


def check(batch: Batch) -> list[float]:
    """Return the errors of dh and dW over those of plain PyTorch, all against float64."""
    offsets = batch.offsets[: CHECKED_ROWS + 1]
    end = int(offsets[-1])
    pull = torch.randn(end, device="cuda")
    grads = []
    for head, dtype in (
        (plain_logprobs, torch.float64),
        (our_logprobs, torch.bfloat16),
        (plain_logprobs, torch.bfloat16),
    ):
        part = replace(
            batch,
            hidden=batch.hidden.detach()[:CHECKED_ROWS].to(dtype).requires_grad_(),
            weight=batch.weight.detach().to(dtype).requires_grad_(),
            ids=batch.ids[:end],
            offsets=offsets,
            targets=batch.targets[:CHECKED_ROWS],
            advantages=batch.advantages[:CHECKED_ROWS],
            plan=make_plan(offsets),
        )
        outputs = head(part)
        pulls = [value.to(outputs[0].dtype) for value in (part.advantages, pull)]
        torch.autograd.backward(outputs, pulls)
        assert part.hidden.grad is not None
        assert part.weight.grad is not None
        grads.append((part.hidden.grad, part.weight.grad))
    errors = [
        [
            float((value.double() - exact).norm())
            for value, exact in zip(grad, grads[0], strict=True)
        ]
        for grad in grads[1:]
    ]
    return [ours / plain for ours, plain in zip(*errors, strict=True)]


def most_memory(batch: Batch) -> int:
    """Return what our head may allocate: dW, and nothing wider than H but a block of wide rows."""
    num_entries, num_states = batch.ids.shape[0], batch.hidden.numel()
    return 2 * batch.weight.numel() + 64 * num_entries + 16 * num_states + 8 * WIDE_BLOCK_ELEMENTS


def run_case(case: Case, width: int, repeats: int, others: bool) -> list[str]:
    """Run one case, print its lines, and return what failed."""
    batch = make_batch(case, width)
    lengths = batch.offsets.diff()
    print(
        f"\n{case.name}, H {width}: {batch.ids.shape[0]} entries, median {int(lengths.median())}, "
        f"widest {int(lengths.max())}, one id {float((lengths == 1).float().mean()):.0%}"
    )
    print(f"  {'':<44}{'device ms (spread)':>26}{'alone ms':>13}{'peak GiB':>9}")
    ours = [partial(train, batch, our_logprobs, centering=both) for both in (False, True)]
    replay, peak = measure("ours, replay", batch, ours[0], repeats)
    centered, _ = measure("ours, replay and exact centering", batch, ours[1], repeats)
    by_loss, _ = measure(
        "ours, through rollout.losses", batch, lambda: train_by_loss(batch), repeats
    )
    product = torch.no_grad()(lambda: batch.hidden @ batch.weight.T)
    measure("one dense product, the floor", batch, product, 3)
    if others:
        plain = partial(train, batch, plain_logprobs, centering=True)
        measure("plain PyTorch, replay and exact centering", batch, plain, 3)
        mask_bytes = 8 * TOKENS * int(lengths.max())
        if mask_bytes > MAX_MASK_BYTES:
            print(f"  chunked head: not run, its padded mask has {mask_bytes / 2**30:.1f} GiB")
        else:
            mask = padded_mask(batch)
            measure("chunked head, replay", batch, lambda: chunked_head(batch, mask), 3)
        for name, other in other_heads(batch).items():
            if other is None:
                print(f"  {name}: not installed")
            else:
                measure(f"{name} {version(name)}, plain loss, no replay", batch, other, 3)
    ratios = check(batch)
    print(
        f"  error over plain PyTorch's, against float64: dh {ratios[0]:.2f}, dW {ratios[1]:.2f} "
        f"(at most 2); centering adds {centered - replay:.3f} ms, rollout.losses "
        f"{by_loss - replay:.3f} ms, both over replay"
    )
    failed = []
    if not max(ratios) <= 2:
        failed.append(f"{case.name}, H {width}: gradients are off")
    if peak > most_memory(batch):
        failed.append(
            f"{case.name}, H {width}: {peak} bytes, at most {most_memory(batch)} expected"
        )
    if case.goal_ms is not None and width == 2048 and centered > case.goal_ms:
        failed.append(f"{case.name}, H {width}: {centered:.3f} ms, at most {case.goal_ms} expected")
    if case.goal_ms is not None and width == 2048 and centered - replay > MAX_CENTERING_MS:
        failed.append(f"{case.name}, H {width}: centering adds more than {MAX_CENTERING_MS} ms")
    return failed


def main() -> None:
    """Run all cases and end with what failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of our head")
    parser.add_argument("--width", type=int, action="append", help="H; 2048 and 4096 when unset")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--ours", action="store_true", help="leave the other heads out")
    options = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, {platform.machine()}, torch {torch.__version__}, triton "
        f"{triton.__version__}; {TOKENS} tokens, {VOCAB} ids, bf16"
    )
    failed = []
    for width in options.width or (2048, 4096):
        for case in CASES:
            if options.case is None or case.name in options.case:
                failed += run_case(case, width, options.repeats, not options.ours)
    for line in failed:
        print(f"FAILED {line}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
