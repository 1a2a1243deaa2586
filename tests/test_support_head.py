"""`support_logprobs` against dense float64 log-softmax, and its errors."""

from __future__ import annotations

import itertools

import pytest
import torch

from rollout.kernels.support_head import (
    missing_targets,
    support_logprobs,
    support_logprobs_reference,
)


def make_case(
    seed: int, lengths: list[int], vocab: int = 97, width: int = 24
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(vocab, generator=generator)[:length] for length in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    targets = [
        int(row[torch.randint(len(row), (1,), generator=generator)]) if len(row) else 0
        for row in ids
    ]
    return {
        "hidden": torch.randn(len(lengths), width, generator=generator, dtype=torch.float64),
        "weight": torch.randn(vocab, width, generator=generator, dtype=torch.float64),
        "support_ids": torch.cat(ids).to(torch.int32),
        "support_offsets": offsets,
        "target_ids": torch.tensor(targets),
        "inverse_temperature": torch.rand(len(lengths), generator=generator).double() + 0.5,
    }


def dense_oracle(case: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense logits, -inf off the support, log-softmax, row by row."""
    logits = case["hidden"] @ case["weight"].T * case["inverse_temperature"][:, None]
    bounds = case["support_offsets"].tolist()
    targets, entries = [], []
    for row, (start, end) in enumerate(itertools.pairwise(bounds)):
        ids = case["support_ids"][start:end].long()
        if start == end:
            targets.append(logits.new_zeros(()))
            continue
        mask = torch.full_like(logits[row], -torch.inf)
        mask[ids] = 0.0
        logprobs = torch.log_softmax(logits[row] + mask, -1)
        targets.append(logprobs[case["target_ids"][row]])
        entries.append(logprobs[ids])
    return torch.stack(targets), torch.cat(entries)


LENGTHS = [
    pytest.param([3, 1, 0, 17, 97, 2, 1], id="mixed"),
    pytest.param([1, 1, 1], id="singletons"),
    pytest.param([97, 97], id="whole-vocabulary"),
    pytest.param([0, 5, 0], id="empty-ends"),
]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_reference_equals_dense_log_softmax(lengths: list[int]) -> None:
    case = make_case(0, lengths)
    targets, entries = support_logprobs_reference(**case)
    want_targets, want_entries = dense_oracle(case)
    torch.testing.assert_close(targets, want_targets, rtol=0, atol=1e-12)
    torch.testing.assert_close(entries, want_entries, rtol=0, atol=1e-12)


def test_reference_passes_gradcheck() -> None:
    case = make_case(1, [3, 1, 0, 7, 2], vocab=11, width=4)
    hidden = case.pop("hidden").requires_grad_()
    weight = case.pop("weight").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, w: support_logprobs_reference(h, w, **case), (hidden, weight)
    )


def test_singletons_are_exactly_zero_and_touch_nothing() -> None:
    case = make_case(2, [1, 4, 1])
    case["hidden"][0] = torch.nan  # a row that needs no work can't be spoilt by its hidden state
    hidden, weight = case["hidden"].requires_grad_(), case["weight"].requires_grad_()
    targets, entries = support_logprobs(**case)
    assert targets[0] == 0
    assert targets[2] == 0
    (targets.sum() + (entries * torch.arange(1.0, 7.0)).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert torch.equal(hidden.grad[[0, 2]], torch.zeros_like(hidden.grad[[0, 2]]))
    unnamed = torch.ones(97, dtype=torch.bool)
    unnamed[case["support_ids"][1:5].long()] = False
    assert torch.equal(weight.grad[unnamed], torch.zeros_like(weight.grad[unnamed]))


def test_repeated_ids_count_twice() -> None:
    case = make_case(3, [3])
    case["support_ids"] = torch.tensor([5, 9, 5], dtype=torch.int32)
    case["target_ids"] = torch.tensor([5])
    logits = case["hidden"] @ case["weight"][[5, 9, 5]].T * case["inverse_temperature"]
    targets, entries = support_logprobs(**case)
    want = torch.log_softmax(logits[0], 0)
    torch.testing.assert_close(entries, want)
    torch.testing.assert_close(targets, want[:1])


def test_missing_target_raises_and_is_found_without_raising() -> None:
    case = make_case(4, [3, 2, 0])
    case["target_ids"][1] = 96 if 96 not in case["support_ids"][3:5] else 95
    with pytest.raises(ValueError, match=r"row 1: target id \d+ is not in its support"):
        support_logprobs(**case)
    missing = missing_targets(case["support_ids"], case["support_offsets"], case["target_ids"])
    assert missing.tolist() == [False, True, False]
    targets, _ = support_logprobs(**case, check_targets=False)
    assert targets.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"support_ids": torch.tensor([0, 97, 1])}, r"span \[0, 97\]", id="id"),
        pytest.param({"support_offsets": torch.tensor([0, 2])}, "from 0 to 2, expected", id="end"),
        pytest.param({"target_ids": torch.tensor([0, 1])}, r"target_ids is \[2\]", id="rows"),
        pytest.param({"support_ids": torch.zeros(3)}, "support_ids is torch.float32", id="dtype"),
        pytest.param({"hidden": torch.zeros(1, 24)}, "expected one floating dtype", id="mixed"),
        pytest.param({"hidden": torch.zeros(24)}, r"hidden is \[24\]", id="ndim"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, torch.Tensor], message: str) -> None:
    case = make_case(5, [3]) | change
    with pytest.raises(ValueError, match=message):
        support_logprobs(**case)
