"""The routing of a mixed batch: every path against dense float64, and what each row costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollout.head import HeadOutput, HeadPlan, Normaliser, head_logprobs, plan_head
from rollout.kernels.wide_rows import find_wide_rows

V, H = 400, 16
KINDS = ["exact", "head", "draws", "none", "greedy", "wide", "exact", "draws", "masked"]


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    """Return one row of each kind, float64; the draws hold repeats and one holds its target."""
    generator = torch.Generator().manual_seed(seed)
    widths = {"exact": 4, "head": 4, "draws": 6, "none": 0, "greedy": 1, "wide": 80, "masked": 3}
    ids: list[Tensor] = []
    targets: list[int] = []
    for kind in KINDS:
        row = torch.randperm(V, generator=generator)[: widths[kind]]
        if kind == "draws":
            row[3:5] = row[0]
        own = kind in ("exact", "greedy", "wide", "masked") or (kind == "draws" and len(ids) > 5)
        targets.append(int(row[0]) if own else 399)
        ids.append(row)
    kinds = [kind in ("head", "draws") for kind in KINDS]
    return {
        "hidden": torch.randn(len(KINDS), H, generator=generator, dtype=torch.float64),
        "weight": torch.randn(V, H, generator=generator, dtype=torch.float64),
        "support_ids": torch.cat(ids).to(torch.int32),
        "support_offsets": torch.tensor([0, *map(len, ids)]).cumsum(0),
        "target_ids": torch.tensor(targets),
        "temperature": torch.tensor([0.0 if k == "greedy" else 0.7 for k in KINDS]).double(),
        "support_valid": torch.tensor([kind != "none" for kind in KINDS]),
        "support_is_samples": torch.tensor([kind == "draws" for kind in KINDS]),
        "sampler_tail_mass": torch.where(torch.tensor(kinds), 0.1, 0.0),
        "needed": torch.tensor([kind != "masked" for kind in KINDS]),
    }


def plan(batch: dict[str, Tensor], normaliser: Normaliser) -> HeadPlan:
    # the dtype only decides whether a wide support may take the product with the whole weight
    return plan_head(
        support_offsets=batch["support_offsets"],
        support_valid=batch["support_valid"],
        support_is_samples=batch["support_is_samples"],
        sampler_tail_mass=batch["sampler_tail_mass"],
        vocab_size=V,
        weight_dtype=torch.bfloat16,
        normaliser=normaliser,
        needed=batch["needed"],
    )


def run(batch: dict[str, Tensor], made: HeadPlan) -> HeadOutput:
    return head_logprobs(
        batch["hidden"],
        batch["weight"],
        batch["support_ids"],
        batch["support_offsets"],
        batch["target_ids"],
        batch["temperature"],
        made,
    )


def oracle_row(batch: dict[str, Tensor], row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (target, entries, tail mass) of one row by dense log-softmax."""
    start, end = batch["support_offsets"][row : row + 2].tolist()
    ids = batch["support_ids"][start:end].long()
    logits = batch["weight"] @ batch["hidden"][row] / 0.7
    if KINDS[row] in ("exact", "greedy", "wide"):
        logits = torch.full_like(logits, -torch.inf).index_copy(0, ids, logits[ids])
    logprobs = logits.log_softmax(0)
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
    return logprobs[batch["target_ids"][row]], logprobs[ids], logprobs[outside].exp().sum()


@pytest.mark.parametrize("normaliser", ["needed", "cancels"])
def test_every_kind_equals_dense_float64(normaliser: Normaliser) -> None:
    batch = make_batch()
    out = run(batch, plan(batch, normaliser))
    for row, kind in enumerate(KINDS):
        start, end = batch["support_offsets"][row : row + 2].tolist()
        entries = out.support_logprobs[start:end]
        if kind == "masked":
            assert out.target_logprobs[row].isnan()
            assert entries.isnan().all()
            continue
        target, logprobs, tail = oracle_row(batch, row)
        free = kind == "draws" and normaliser == "cancels"
        assert bool(out.is_normalised[row]) is not free
        if free:
            # right up to one constant of the row
            constant = out.target_logprobs[row] - target
            torch.testing.assert_close(entries - constant, logprobs)
            assert out.tail_mass[row] == 0
        else:
            torch.testing.assert_close(out.target_logprobs[row], target)
            torch.testing.assert_close(entries, logprobs)
            torch.testing.assert_close(out.tail_mass[row], tail, atol=1e-12, rtol=1e-9)


def test_gradients_of_a_mixed_batch_equal_those_of_dense_float64() -> None:
    batch = make_batch(1)
    batch["hidden"].requires_grad_()
    batch["weight"].requires_grad_()
    generator = torch.Generator().manual_seed(2)
    out = run(batch, plan(batch, "needed"))
    pulls = [
        torch.randn(x.shape, generator=generator).double()
        for x in (out.target_logprobs, out.support_logprobs, out.tail_mass)
    ]
    # no number is the masked row's, and none may reach a gradient
    loss = (out.target_logprobs * pulls[0]).nansum() + (out.support_logprobs * pulls[1]).nansum()
    loss = loss + (out.tail_mass * pulls[2]).sum()
    got = torch.autograd.grad(loss, (batch["hidden"], batch["weight"]))
    want_loss = torch.zeros((), dtype=torch.float64)
    for row, kind in enumerate(KINDS):
        if kind == "masked":
            continue
        start, end = batch["support_offsets"][row : row + 2].tolist()
        target, entries, tail = oracle_row(batch, row)
        want_loss = want_loss + target * pulls[0][row] + (entries * pulls[1][start:end]).sum()
        want_loss = want_loss + tail * pulls[2][row]
    want = torch.autograd.grad(want_loss, (batch["hidden"], batch["weight"]))
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])


def test_o16_centered_draws_are_free_of_the_normaliser() -> None:
    batch = make_batch(3)
    batch["hidden"].requires_grad_()
    batch["weight"].requires_grad_()
    rows = [row for row, kind in enumerate(KINDS) if kind == "draws"]
    losses = []
    for normaliser in ("needed", "cancels"):
        out = run(batch, plan(batch, normaliser))
        loss = torch.zeros((), dtype=torch.float64)
        for row in rows:
            start, end = batch["support_offsets"][row : row + 2].tolist()
            loss = loss + out.target_logprobs[row] - out.support_logprobs[start:end].mean()
        losses.append((loss, *torch.autograd.grad(loss, (batch["hidden"], batch["weight"]))))
    for got, want in zip(losses[1], losses[0], strict=True):
        torch.testing.assert_close(got, want)


def test_rows_take_the_cheapest_exact_path() -> None:
    made = plan(make_batch(), "cancels")
    assert made.sparse is not None
    assert made.wide_rows is not None
    assert made.dense is not None
    sparse = [KINDS[i] for i in made.sparse.rows]
    assert sparse == ["exact", "draws", "greedy", "wide", "exact", "draws"]
    assert [sparse[i] for i in made.wide_rows] == ["wide"]
    assert [KINDS[i] for i in made.dense.rows] == ["head", "none"]
    needed = plan(make_batch(), "needed")
    assert needed.dense is not None
    assert [KINDS[i] for i in needed.dense.rows] == ["head", "draws", "none", "draws"]


def test_32_bit_weights_have_no_wide_rows() -> None:
    assert find_wide_rows(torch.tensor([0, 300]), 400, torch.bfloat16).tolist() == [0]
    assert find_wide_rows(torch.tensor([0, 300]), 400, torch.float32).tolist() == []
    with pytest.raises(ValueError, match="support_offsets are on meta, expected cpu"):
        find_wide_rows(torch.tensor([0, 300], device="meta"), 400, torch.bfloat16)


def test_a_batch_of_exact_rows_selects_nothing() -> None:
    batch = make_batch()
    rows = torch.tensor([0, 6])
    made = plan_head(
        support_offsets=torch.tensor([0, 4, 8]),
        support_valid=batch["support_valid"][rows],
        support_is_samples=batch["support_is_samples"][rows],
        sampler_tail_mass=batch["sampler_tail_mass"][rows],
        vocab_size=V,
        weight_dtype=torch.float32,
    )
    assert made.all_sparse
    assert made.dense is None
    bounds = batch["support_offsets"]
    ids = torch.cat([batch["support_ids"][bounds[r] : bounds[r] + 4] for r in (0, 6)])
    out = head_logprobs(
        batch["hidden"][rows],
        batch["weight"],
        ids,
        torch.tensor([0, 4, 8]),
        batch["target_ids"][rows],
        batch["temperature"][rows],
        made,
    )
    want = torch.stack([oracle_row(batch, r)[0] for r in (0, 6)])
    torch.testing.assert_close(out.target_logprobs, want)


def test_a_missing_target_raises_on_its_path() -> None:
    batch = make_batch()
    batch["target_ids"][0] = 398
    with pytest.raises(ValueError, match="not in its support"):
        run(batch, plan(batch, "needed"))


def test_wrong_plan_arguments_raise() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match=r"support_offsets has shape \(9,\), expected \(10,\)"):
        plan(batch | {"support_offsets": torch.arange(9)}, "needed")
    with pytest.raises(ValueError, match="sampler_tail_mass is on meta, expected cpu"):
        plan(batch | {"sampler_tail_mass": torch.zeros(9, device="meta")}, "needed")


def test_a_plan_moves_as_a_whole() -> None:
    made = plan(make_batch(), "cancels").to(torch.device("meta"))
    assert made.is_normalised.device.type == "meta"
    assert made.dense is not None
    assert made.dense.entries.device.type == "meta"
    assert made.wide_rows is not None
    assert made.wide_rows.device.type == "meta"
