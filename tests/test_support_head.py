"""`support_logprobs` in plain torch against dense float64, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from head_cases import (
    HeadCase,
    assert_close_to_oracle,
    make_case,
    run_with_grads,
    support_oracle,
)
from torch import Tensor

from rollout.kernels.support_head import support_logprobs, support_logprobs_reference
from rollout.kernels.support_rows import missing_targets

LENGTHS = [
    pytest.param([3, 1, 0, 17, 97, 2, 1], id="mixed"),
    pytest.param([1, 1, 1], id="singletons"),
    pytest.param([97, 97], id="whole-vocabulary"),
    pytest.param([0, 5, 0], id="empty-ends"),
]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_reference_equals_dense_log_softmax(lengths: list[int]) -> None:
    case = make_case(0, lengths)
    generator = torch.Generator().manual_seed(1)
    pulls = [torch.randn(n, generator=generator).double() for n in (len(lengths), sum(lengths))]
    got = run_with_grads(
        lambda c: support_logprobs_reference(*c.arguments), case.cast(torch.float64), pulls
    )
    want = run_with_grads(support_oracle, case.cast(torch.float64), pulls)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12, equal_nan=True)


def test_reference_passes_gradcheck() -> None:
    case = make_case(1, [3, 1, 0, 7, 2], vocab=11, width=4)
    rest = case.arguments[2:]
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    assert torch.autograd.gradcheck(
        # of the empty row's NaN there is no finite difference
        lambda h, w: [x.nan_to_num() for x in support_logprobs_reference(h, w, *rest)],
        (hidden, weight),
    )


def test_o32_gradients_are_zero_off_the_support() -> None:
    case = make_case(2, [4, 6]).cast(torch.float64)
    targets, _ = support_logprobs(*case.arguments)
    grad_weight = torch.autograd.grad(targets.sum(), case.weight)[0]
    unnamed = torch.ones(97, dtype=torch.bool)
    unnamed[case.ids.long()] = False
    assert torch.equal(grad_weight[unnamed], torch.zeros_like(grad_weight[unnamed]))
    assert bool((grad_weight[case.ids.long()] != 0).any())


def test_o33_singletons_are_exactly_zero_and_free() -> None:
    case = make_case(2, [1, 4, 1])
    # a row that needs no work can't be spoilt by its hidden state
    case.hidden[0] = torch.nan
    case = case.cast(torch.float64)
    targets, entries = support_logprobs(*case.arguments)
    assert targets[0] == 0
    assert targets[2] == 0
    loss = targets.sum() + (entries * torch.arange(1.0, 7.0)).sum()
    grad_hidden, grad_weight = torch.autograd.grad(loss, (case.hidden, case.weight))
    assert torch.equal(grad_hidden[[0, 2]], torch.zeros_like(grad_hidden[[0, 2]]))
    assert bool(grad_weight.isfinite().all())


def test_repeated_ids_count_twice() -> None:
    case = make_case(3, [3])
    ids = torch.tensor([5, 9, 5], dtype=torch.int32)
    case = replace(case, ids=ids, targets=torch.tensor([5]))
    want = ((case.hidden @ case.weight[[5, 9, 5]].T) * case.scale[:, None])[0].log_softmax(0)
    targets, entries = support_logprobs(*case.arguments)
    torch.testing.assert_close(entries, want)
    torch.testing.assert_close(targets, want[:1])


def test_order_of_entries_changes_nothing() -> None:
    case = make_case(4, [7, 5])
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3, 11, 9, 7, 10, 8])
    targets, entries = support_logprobs(*case.arguments)
    other_targets, other_entries = support_logprobs(*replace(case, ids=case.ids[order]).arguments)
    torch.testing.assert_close(other_targets, targets)
    torch.testing.assert_close(other_entries, entries[order])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_support_of_100_000_ids_among_singletons(device: str) -> None:
    lengths = [1] * 9 + [100_000] + [1] * 9 + [3]
    case = make_case(6, lengths, vocab=120_000, width=16, dtype=torch.float32)
    pulls = [torch.randn(n, generator=torch.Generator().manual_seed(n)).double() for n in
             (len(lengths), sum(lengths))]  # fmt: skip
    assert_close_to_oracle(
        lambda c: support_logprobs(*c.arguments), support_oracle, case, torch.float32, pulls, device
    )


def test_missing_target_raises_and_is_found_without_raising() -> None:
    case = make_case(4, [3, 2, 4])
    case.targets[1] = 96 if 96 not in case.ids[3:5] else 95
    with pytest.raises(ValueError, match=r"row 1: target id \d+ is not in its support"):
        support_logprobs(*case.arguments)
    missing = missing_targets(case.ids, case.offsets, case.targets)
    assert missing.tolist() == [False, True, False]
    targets, _ = support_logprobs(*case.arguments, check_targets=False)
    assert targets.isnan().tolist() == [False, True, False]


def test_a_row_without_a_support_has_no_logprob_here() -> None:
    # 0 would pass for a certain token
    case = make_case(4, [3, 0, 2]).cast(torch.float64)
    with pytest.raises(ValueError, match=r"support of 0 ids.*whole vocabulary: use rollout\.head"):
        support_logprobs(*case.arguments)
    assert missing_targets(case.ids, case.offsets, case.targets).tolist() == [False, True, False]
    targets, _ = support_logprobs(*case.arguments, check_targets=False)
    assert targets.isnan().tolist() == [False, True, False]
    grad_hidden, grad_weight = torch.autograd.grad(targets.sum(), (case.hidden, case.weight))
    assert not grad_hidden[1].any()
    assert bool(grad_weight.isfinite().all())


def changed(field: str, value: Tensor) -> HeadCase:
    case = make_case(5, [3])
    return HeadCase(**{name: getattr(case, name) for name in HeadCase.__slots__} | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        pytest.param("ids", torch.tensor([0, 97, 1]), r"span \[0, 97\]", id="id"),
        pytest.param("offsets", torch.tensor([0, 2]), "from 0 to 2, expected", id="end"),
        pytest.param("targets", torch.tensor([0, 1]), r"target_ids is \[2\]", id="rows"),
        pytest.param("ids", torch.zeros(3), "support_ids is torch.float32", id="dtype"),
        pytest.param("hidden", torch.zeros(1, 24), "expected one floating dtype", id="mixed"),
        pytest.param("hidden", torch.zeros(24), r"hidden is \[24\]", id="ndim"),
        pytest.param("scale", torch.zeros(1, device="meta"), "is on meta, expected", id="device"),
    ],
)
def test_wrong_arguments_raise(field: str, value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        support_logprobs(*changed(field, value).arguments)
