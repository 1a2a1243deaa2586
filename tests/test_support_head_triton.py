"""The sparse head's kernels against dense float64, interpreted or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from head_cases import (
    HeadCase,
    Outputs,
    assert_close_to_oracle,
    make_case,
    run_with_grads,
    support_oracle,
)

from rollout.kernels import head_config, support_head
from rollout.kernels.segment_sum import segment_sums
from rollout.kernels.support_head import support_logprobs

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [
    pytest.param([3, 1, 0, 17, 97, 2, 1], id="mixed"),
    pytest.param([1, 0, 1, 1], id="no-work"),
    pytest.param([1] * 20 + [97, 97] + [2] * 41, id="63-rows"),
]

pytestmark = [
    # numpy, which interprets the kernels here, warns where a GPU computes NaN on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the heads allocate, so that an element which no kernel wrote shows."""

    def poisoned(allocate: Any) -> Any:
        def fill(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = allocate(*args, **kwargs)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else 1 << 20)

        return fill

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(params=["gathered", "dense-block"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with and without the dense block of hot ids, whatever the batch's size."""
    chosen: str = request.param
    hot = chosen == "dense-block"

    def sizes(num_rows: int, num_entries: int, vocab: int, width: int, dtype: torch.dtype) -> int:
        return min(16, vocab) if hot else 0

    monkeypatch.setattr(support_head, "hot_block", sizes)
    return chosen


def sparse(case: HeadCase) -> Outputs:
    return support_logprobs(*case.arguments, impl="triton", check_targets=False)


def wide(case: HeadCase) -> Outputs:
    """Every other row by the product with the whole weight."""
    rows = torch.arange(0, len(case.targets), 2, device=case.targets.device)
    return support_logprobs(*case.arguments, impl="triton", check_targets=False, wide_rows=rows)


def pulls(case: HeadCase, seed: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = len(case.targets), len(case.ids)
    return [torch.randn(size, generator=generator).double() for size in sizes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.usefixtures("block")
def test_sparse_head_equals_float64(lengths: list[int], dtype: torch.dtype, device: str) -> None:
    case = make_case(0, lengths, dtype=dtype)
    assert_close_to_oracle(sparse, support_oracle, case, dtype, pulls(case), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.usefixtures("block")
def test_wide_rows_equal_float64(lengths: list[int], dtype: torch.dtype, device: str) -> None:
    case = make_case(1, lengths, vocab=300, dtype=dtype)
    assert_close_to_oracle(wide, support_oracle, case, dtype, pulls(case), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("block")
def test_long_segments_are_split(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(head_config, "MIN_SUM_TILE", 4)
    # ids of 0 to 4 in every row make long segments both by row and by id
    case = make_case(2, [40, 3, 1, 0, 17, 97, 2, 1, 64], repeats=True, dtype=torch.float32)
    assert_close_to_oracle(sparse, support_oracle, case, torch.float32, pulls(case), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 63, 255, 300])
@pytest.mark.usefixtures("block")
def test_odd_widths(width: int, device: str) -> None:
    case = make_case(3, [5, 2, 9], width=width, dtype=torch.float32)
    assert_close_to_oracle(sparse, support_oracle, case, torch.float32, pulls(case), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("only", [0, 1], ids=["targets", "entries"])
def test_one_of_two_gradients(only: int, device: str) -> None:
    case = make_case(4, [5, 2, 1, 9], dtype=torch.float32)
    chosen = [pull if index == only else None for index, pull in enumerate(pulls(case))]
    for head in (sparse, wide):
        assert_close_to_oracle(head, support_oracle, case, torch.float32, chosen, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
@pytest.mark.usefixtures("block")
def test_a_frozen_side_gets_no_gradient(frozen: str, device: str) -> None:
    case = make_case(5, [5, 2, 1, 9], dtype=torch.float32)
    free = "weight" if frozen == "hidden" else "hidden"
    want = run_with_grads(support_oracle, case.cast(torch.float64), pulls(case))
    for head in (sparse, wide):
        leaves = case.cast(torch.float32, device)
        getattr(leaves, frozen).requires_grad_(False)
        torch.autograd.backward(head(leaves), [p.float().to(device) for p in pulls(case)])
        assert getattr(leaves, frozen).grad is None
        got = getattr(leaves, free).grad.double().cpu()
        torch.testing.assert_close(got, want[2 if free == "hidden" else 3], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("block")
def test_strided_inputs_and_wide_integers(device: str) -> None:
    case = make_case(6, [5, 2, 1, 9], dtype=torch.float32)
    leaves = case.cast(torch.float32, device)
    want = run_with_grads(sparse, leaves, pulls(case))
    hidden = leaves.hidden.detach().T.contiguous().T.requires_grad_()
    weight = torch.stack([leaves.weight.detach()] * 2, 1)[:, 0].requires_grad_()
    other = replace(leaves, hidden=hidden, weight=weight, ids=leaves.ids.long())
    got = run_with_grads(sparse, other, pulls(case))
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("block")
def test_missing_target_is_nan_and_its_row_keeps_the_entries_gradient(device: str) -> None:
    case = make_case(7, [5, 4], dtype=torch.float32)
    want = run_with_grads(support_oracle, case.cast(torch.float64), [None, pulls(case)[1]])
    case.targets[0] = next(i for i in range(97) if i not in case.ids[:5])
    leaves = case.cast(torch.float32, device)
    targets, entries = sparse(leaves)
    assert targets.isnan().tolist() == [True, False]
    torch.autograd.backward(
        [targets, entries],
        [torch.tensor([3.0, 0.0], device=device), pulls(case)[1].float().to(device)],
    )
    assert leaves.hidden.grad is not None
    torch.testing.assert_close(leaves.hidden.grad.double().cpu(), want[2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_single_entries_are_free_of_their_hidden_state(device: str) -> None:
    case = make_case(8, [1, 4, 1], dtype=torch.float32)
    case.hidden[0] = torch.nan
    leaves = case.cast(torch.float32, device)
    targets, entries = sparse(leaves)
    assert targets[[0, 2]].tolist() == [0.0, 0.0]
    torch.autograd.backward([targets, entries], [p.float().to(device) for p in pulls(case)])
    assert leaves.hidden.grad is not None
    assert leaves.weight.grad is not None
    assert torch.equal(leaves.hidden.grad[[0, 2]].cpu(), torch.zeros(2, 24))
    assert bool(leaves.weight.grad.isfinite().all())


def test_logits_of_a_huge_size_stay_finite() -> None:
    case = make_case(9, [4, 3], dtype=torch.float32)
    case.weight[case.ids[1].long()] = -1e30 * case.hidden[0].sign()
    leaves = case.cast(torch.float32)
    targets, entries = sparse(leaves)
    torch.autograd.backward([targets, entries], [p.float() for p in pulls(case)])
    assert leaves.hidden.grad is not None
    assert not bool(entries.isnan().any())
    assert bool(leaves.hidden.grad[1].isfinite().all())


def test_no_entries_at_all() -> None:
    case = make_case(10, [0, 0], dtype=torch.float32).cast(torch.float32)
    targets, entries = sparse(case)
    assert targets.isnan().all()
    assert entries.shape == (0,)
    torch.autograd.backward(targets.sum())
    assert case.weight.grad is not None
    assert torch.equal(case.weight.grad, torch.zeros_like(case.weight))


def test_no_rows_at_all() -> None:
    case = make_case(10, [2], dtype=torch.float32).cast(torch.float32)
    case = replace(
        case,
        hidden=case.hidden.detach()[:0].requires_grad_(),
        ids=case.ids[:0],
        offsets=case.offsets[:1],
        targets=case.targets[:0],
        scale=case.scale[:0],
    )
    targets, entries = sparse(case)
    assert targets.shape == entries.shape == (0,)
    torch.autograd.backward(targets.sum())
    assert case.weight.grad is not None
    assert torch.equal(case.weight.grad, torch.zeros_like(case.weight))


@pytest.mark.parametrize(
    ("rows", "entries", "dtype", "block"),
    [
        pytest.param(16384, 16384 * 128, torch.bfloat16, 2048, id="wide-batch"),
        pytest.param(16384, 16384 * 8, torch.bfloat16, 0, id="short-supports"),
        pytest.param(16384, 16384 * 128, torch.float32, 0, id="fp32"),
        pytest.param(10, 4000, torch.bfloat16, 0, id="few-rows"),
    ],
)
def test_which_batches_have_a_dense_block(
    rows: int, entries: int, dtype: torch.dtype, block: int
) -> None:
    assert head_config.hot_block(rows, entries, 151_936, 4096, dtype) == block
    # its matrices fit N * H
    assert head_config.hot_block(rows, entries, 151_936, 512, dtype) == min(block, 512)


def test_no_sums_are_asked_for() -> None:
    segment_sums(None, None, num_rows=3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("wide_rows", [[], [250, 253]], ids=["no-wide", "wide"])
@pytest.mark.parametrize("hot", [True, False], ids=["dense-block", "gathered"])
def test_repeatable_and_free_of_waits_on_cuda(
    hot: bool, wide_rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support_head, "hot_block", lambda *shape: 64 if hot else 0)
    lengths = [1] * 200 + [300] * 50 + [2000] * 5 + [2] * 300
    case = make_case(11, lengths, vocab=5003, width=264, dtype=torch.bfloat16)
    leaves = case.cast(torch.bfloat16, "cuda")
    grads = [p.float().cuda() for p in pulls(case)]
    rows = torch.tensor(wide_rows, dtype=torch.int64, device="cuda") if wide_rows else None
    runs = []
    for _ in range(3):
        torch.cuda.set_sync_debug_mode("error")
        torch.autograd.backward(support_logprobs(*leaves.arguments, wide_rows=rows), grads)
        torch.cuda.set_sync_debug_mode("default")
        assert leaves.hidden.grad is not None
        assert leaves.weight.grad is not None
        runs.append((leaves.hidden.grad, leaves.weight.grad))
        leaves.hidden.grad = leaves.weight.grad = None
    for run in runs[1:]:
        assert torch.equal(run[0], runs[0][0])
        assert torch.equal(run[1], runs[0][1])


@pytest.mark.gpu
def test_weight_beyond_two_to_the_31_elements_on_cuda() -> None:
    vocab, width = (1 << 31) // 2048 + 1000, 2048
    weight = torch.zeros(vocab, width, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([vocab - 1, 5, vocab - 2, 7], dtype=torch.int32, device="cuda")
    rows = torch.randn(4, width, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[ids.long()] = rows.cuda().bfloat16()
    hidden = torch.ones(2, width, device="cuda", dtype=torch.bfloat16)
    targets, entries = support_logprobs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        ids,
        torch.tensor([0, 2, 4], device="cuda"),
        ids[[0, 2]].long(),
        torch.ones(2, device="cuda"),
    )
    logits = rows.bfloat16().double().sum(1).view(2, 2)
    want = logits.log_softmax(1)
    torch.testing.assert_close(entries.double().cpu().view(2, 2), want, atol=1e-5, rtol=1e-5)
    torch.autograd.backward(targets.sum())
    assert weight.grad is not None
    got = weight.grad[ids.long()].double().cpu()
    mass = 1 - want[:, 0].exp()
    want_grad = torch.stack([mass, -mass], 1).view(4, 1).expand(4, width)
    torch.testing.assert_close(got, want_grad, atol=1e-2, rtol=1e-2)
    assert int(weight.grad.count_nonzero()) == 4 * width


@pytest.mark.gpu
def test_ids_out_of_the_vocabulary_are_nan_on_cuda() -> None:
    case = make_case(12, [3, 3], dtype=torch.float32)
    case.ids[1] = 97
    leaves = case.cast(torch.float32, "cuda")
    for head in (sparse, wide):
        entries = head(leaves)[1]
        assert entries.isnan().tolist() == [True, True, True, False, False, False]
