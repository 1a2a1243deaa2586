"""The chunked dense head against dense float64, in plain torch and by its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from head_cases import (
    HeadCase,
    Outputs,
    assert_close_to_oracle,
    make_case,
    run_with_grads,
    vocab_oracle,
)

from rollout.kernels import dense_head
from rollout.kernels.dense_head import dense_logprobs
from rollout.kernels.launch import Impl
from rollout.kernels.matmul import vocab_blocks

IMPLS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("triton", "cpu", id="triton"),
    pytest.param("triton", "cuda", id="cuda", marks=pytest.mark.gpu),
]

pytestmark = [
    # numpy, which interprets the kernels here, warns where a GPU computes NaN on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk over the vocabulary in blocks of 128 ids."""
    monkeypatch.setattr(dense_head, "DENSE_BLOCK_ELEMENTS", 1)


def case_of(seed: int, *, repeats: bool = False, dtype: torch.dtype = torch.float32) -> HeadCase:
    case = make_case(seed, [3, 1, 0, 17, 60, 2], vocab=333, repeats=repeats, dtype=dtype)
    # a target need not be among the entries
    return replace(case, targets=torch.tensor([7, 332, 128, 127, 0, 200]))


def pulls(case: HeadCase) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    sizes = len(case.targets), len(case.ids), len(case.targets)
    return [torch.randn(size, generator=generator).double() for size in sizes]


def test_reference_passes_gradcheck() -> None:
    case = make_case(1, [3, 1, 0, 7], vocab=11, width=4)
    rest = case.arguments[2:]
    assert torch.autograd.gradcheck(
        lambda h, w: dense_logprobs(h, w, *rest, impl="reference")[:3],
        (case.hidden.requires_grad_(), case.weight.requires_grad_()),
    )


@pytest.mark.parametrize(("impl", "device"), IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeats"])
def test_dense_head_equals_float64(
    repeats: bool, dtype: torch.dtype, impl: Impl, device: str
) -> None:
    def head(case: HeadCase) -> Outputs:
        return dense_logprobs(*case.arguments, impl=impl)[:3]

    case = case_of(2, repeats=repeats, dtype=dtype)
    assert_close_to_oracle(head, vocab_oracle, case, dtype, pulls(case), device)


@pytest.mark.parametrize(("impl", "device"), IMPLS)
@pytest.mark.parametrize("only", [0, 1, 2], ids=["targets", "entries", "tail"])
def test_one_gradient_at_a_time(only: int, impl: Impl, device: str) -> None:
    def head(case: HeadCase) -> Outputs:
        return dense_logprobs(*case.arguments, impl=impl)[:3]

    case = case_of(3)
    chosen = [pull if index == only else None for index, pull in enumerate(pulls(case))]
    assert_close_to_oracle(head, vocab_oracle, case, torch.float32, chosen, device)


@pytest.mark.parametrize(("impl", "device"), IMPLS)
def test_a_row_without_a_tail(impl: Impl, device: str) -> None:
    case = make_case(4, [150, 2], vocab=150, dtype=torch.float32)
    leaves = case.cast(torch.float32, device)
    out = dense_logprobs(*leaves.arguments, impl=impl)
    assert out.tail[0] == -torch.inf
    want = vocab_oracle(case)
    torch.testing.assert_close(out.tail[1].double().cpu(), want[2][1], atol=1e-6, rtol=1e-5)
    # what a loss reads of it: a mass of 0, with no gradient
    torch.autograd.backward(out.tail.exp()[0])
    assert leaves.hidden.grad is not None
    assert torch.equal(leaves.hidden.grad.cpu(), torch.zeros(2, 24))


@pytest.mark.parametrize(("impl", "device"), IMPLS)
def test_o37_a_small_tail_keeps_its_digits(impl: Impl, device: str) -> None:
    case = make_case(5, [2], vocab=200, dtype=torch.float32)
    case.weight[:] = 0.0
    case.weight[case.ids.long()] = 30.0 * case.hidden / case.hidden.norm() ** 2 / case.scale
    exact = vocab_oracle(case)[2]
    assert float(exact) < -20
    out = dense_logprobs(*case.cast(torch.float32, device).arguments, impl=impl)
    # one minus the head's mass would be 0 in fp32, or noise
    torch.testing.assert_close(out.tail.double().cpu(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("impl", "device"), IMPLS)
def test_logz_is_that_of_the_vocabulary_and_has_no_gradient(impl: Impl, device: str) -> None:
    case = case_of(6)
    out = dense_logprobs(*case.cast(torch.float32, device).arguments, impl=impl)
    want = ((case.hidden @ case.weight.T) * case.scale[:, None]).logsumexp(1)
    torch.testing.assert_close(out.logz.double().cpu(), want, atol=1e-5, rtol=1e-6)
    assert not out.logz.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen: str) -> None:
    case = case_of(7)
    want = run_with_grads(vocab_oracle, case.cast(torch.float64), pulls(case))
    leaves = case.cast(torch.float32)
    getattr(leaves, frozen).requires_grad_(False)
    out = dense_logprobs(*leaves.arguments, impl="triton")[:3]
    torch.autograd.backward(out, [pull.float() for pull in pulls(case)])
    assert getattr(leaves, frozen).grad is None
    free = "weight" if frozen == "hidden" else "hidden"
    got = getattr(leaves, free).grad.double()
    torch.testing.assert_close(got, want[3 if free == "hidden" else 4], atol=1e-4, rtol=1e-4)


def test_wrong_arguments_raise() -> None:
    case = case_of(8)
    with pytest.raises(ValueError, match="expected one floating dtype"):
        dense_logprobs(*replace(case, hidden=case.hidden.float()).arguments)


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 151_936])
def test_blocks_cover_the_vocabulary_once(vocab: int) -> None:
    blocks = list(vocab_blocks(16_384, vocab, 2048, 1 << 27))
    assert [first for first, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == vocab
    assert all((end - first) * 16_384 <= 1 << 27 for first, end in blocks)
