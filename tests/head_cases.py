"""Batches with known supports, a dense float64 oracle, and how far a kernel may be from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Head = Callable[["HeadCase"], Outputs]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}
"""Relative error that is allowed beyond twice torch's own; the interpreter truncates to bf16."""
DEVICE_TOLERANCE = {torch.float32: 3e-5}
"""The same on a GPU, whose exponential is off by 2 ulp, which the gradient of a tail shows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadCase:
    """The arguments of the heads."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    offsets: Tensor
    targets: Tensor
    scale: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Positional arguments of any head."""
        return self.hidden, self.weight, self.ids, self.offsets, self.targets, self.scale

    def cast(self, dtype: torch.dtype, device: str = "cpu") -> HeadCase:
        """Return leaves of another dtype that want gradients."""
        scale = self.scale.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        return replace(
            self,
            hidden=self.hidden.detach().to(device, dtype, copy=True).requires_grad_(),
            weight=self.weight.detach().to(device, dtype, copy=True).requires_grad_(),
            ids=self.ids.to(device),
            offsets=self.offsets.to(device),
            targets=self.targets.to(device),
            scale=scale,
        )


def make_case(
    seed: int,
    lengths: Sequence[int],
    *,
    vocab: int = 97,
    width: int = 24,
    repeats: bool = False,
    dtype: torch.dtype = torch.float64,
) -> HeadCase:
    """Return rows of these lengths, rounded to `dtype` and held in float64."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randperm(vocab, generator=generator)[:length]
        if repeats:
            ids = torch.randint(5, (length,), generator=generator)
        rows.append(ids)
    picks = [
        int(torch.randint(len(row), (1,), generator=generator)) if len(row) else 0 for row in rows
    ]
    return HeadCase(
        hidden=torch.randn(len(rows), width, generator=generator).to(dtype).double(),
        weight=(torch.randn(vocab, width, generator=generator) * 0.5).to(dtype).double(),
        ids=torch.cat(rows).to(torch.int32),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        targets=torch.tensor(
            [int(r[p]) if len(r) else 0 for r, p in zip(rows, picks, strict=True)]
        ),
        scale=(torch.rand(len(rows), generator=generator) + 0.5).double(),
    )


def dense_logits(case: HeadCase) -> Tensor:
    """Return [N, V] logits in the dtype of the product, then at least fp32."""
    logits = case.hidden @ case.weight.T
    return (logits if logits.dtype == torch.float64 else logits.float()) * case.scale[:, None]


def support_oracle(case: HeadCase) -> Outputs:
    """Normalise dense logits over each row's entries, as often as they stand there.

    The target of an empty row is NaN.
    """
    logits = dense_logits(case)
    targets, entries = [], []
    for row, (start, end) in enumerate(itertools.pairwise(case.offsets.tolist())):
        ids = case.ids[start:end].long()
        logprobs = logits[row, ids].log_softmax(0)
        place = (ids == case.targets[row]).nonzero()
        targets.append(logprobs[place[0, 0]] if start < end else logits.new_tensor(torch.nan))
        entries.append(logprobs)
    return torch.stack(targets), torch.cat(entries)


def vocab_oracle(case: HeadCase) -> Outputs:
    """Normalise dense logits over the vocabulary; the third result is the log of the tail."""
    logprobs = dense_logits(case).log_softmax(-1)
    entries, tails = [], []
    for row, (start, end) in enumerate(itertools.pairwise(case.offsets.tolist())):
        ids = case.ids[start:end].long()
        outside = torch.ones_like(logprobs[row], dtype=torch.bool)
        outside[ids] = False
        entries.append(logprobs[row, ids])
        tails.append(logprobs[row][outside].logsumexp(0))
    targets = logprobs.gather(1, case.targets[:, None]).squeeze(1)
    return targets, torch.cat(entries), torch.stack(tails)


def run_with_grads(head: Head, case: HeadCase, pulls: Sequence[Tensor | None]) -> list[Tensor]:
    """Return a head's outputs, then its gradients of the hidden states and the weight."""
    outputs = head(case)
    chosen = [(out, pull) for out, pull in zip(outputs, pulls, strict=True) if pull is not None]
    torch.autograd.backward(
        [out for out, _ in chosen], [pull.to(out.device, out.dtype) for out, pull in chosen]
    )
    assert case.hidden.grad is not None
    assert case.weight.grad is not None
    results = [*outputs, case.hidden.grad, case.weight.grad]
    return [value.detach().double().cpu() for value in results]


def relative_error(value: Tensor, exact: Tensor, least: float) -> float:
    """Return |value - exact| / max(|exact|, least); NaN anywhere fails every bound."""
    return float((value - exact).norm()) / (max(float(exact.norm()), least) or 1.0)


def assert_close_to_oracle(
    head: Head,
    oracle: Head,
    case: HeadCase,
    dtype: torch.dtype,
    pulls: Sequence[Tensor | None],
    device: str = "cpu",
) -> None:
    """Compare each result with float64, by the error of plain torch at the same dtype."""
    tolerance = (TOLERANCE if device == "cpu" else TOLERANCE | DEVICE_TOLERANCE)[dtype]
    exact = run_with_grads(oracle, case.cast(torch.float64), pulls)
    plain = run_with_grads(oracle, case.cast(dtype), pulls)
    ours = run_with_grads(head, case.cast(dtype, device), pulls)
    for index, (value, near, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        assert torch.equal(value.isnan(), truth.isnan()), f"result {index}: other NaN"
        value, near, truth = (each.nan_to_num() for each in (value, near, truth))
        # log-probabilities are right up to an absolute error, gradients up to a relative one
        least = 1.0 if index < len(pulls) else 0.0
        error = relative_error(value, truth, least)
        allowed = 2 * relative_error(near, truth, least) + tolerance
        assert error <= allowed, f"result {index}: error {error:.2e}, allowed {allowed:.2e}"
