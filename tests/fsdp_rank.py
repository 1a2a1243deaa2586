"""One rank of the FSDP2 test, a process of its own: `python fsdp_rank.py FOLDER RANK WORLD_SIZE`.

Every rank takes its rollouts of one global batch through body, head and loss, in two micro-batches,
and rank 0 writes the whole gradients. A world of one uses no FSDP2: it is what the others equal.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from synthetic import make_row
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollout.batch import RolloutBatch, pack_rollouts
from rollout.head import HeadPlan, plan_batch, score_batch
from rollout.losses import LossConfig, compute_loss
from rollout.rows import RolloutRow
from rollout.sharded import sum_gradients, whole_weight

SPARED = "d"  # the rollout whose tokens are no loss tokens
V, H = 51, 6  # an odd number of ids: the shards differ in size
LOSSES = {
    "icepop": LossConfig(loss="icepop", centering="exact", kl_q_p=0.1, ratio_high=50.0),
    "reinforce": LossConfig(loss="reinforce"),
}


class Body(nn.Module):
    """Causal means over each sequence's embeddings, and a layer."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layer = nn.Linear(H, H)

    def forward(self, batch: RolloutBatch) -> Tensor:
        """Return [N, H], the states that predict the scored tokens."""
        embedded = self.embedding(batch.input_ids)
        bounds = batch.cu_seqlens.tolist()
        means = [
            embedded[a:b].cumsum(0) / torch.arange(1, b - a + 1)[:, None]
            for a, b in itertools.pairwise(bounds)
        ]
        states: Tensor = torch.tanh(self.layer(torch.cat(means)))[batch.hidden_index]
        return states


class Model(nn.Module):
    """A causal language model; `forward` runs body, head and loss."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.body = Body(nn.Embedding(V, H))
        self.lm_head = nn.Linear(H, V, bias=False)
        if tied:
            self.lm_head.weight = self.body.embedding.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7, generator=generator)
        self.double()

    def forward(self, batch: RolloutBatch, plan: HeadPlan, config: LossConfig) -> Tensor:
        """Return the loss of one micro-batch."""
        inputs = score_batch(self.body(batch), self.lm_head.weight, batch, plan)
        return compute_loss(inputs, config).loss


def global_batch(loss: str) -> list[tuple[RolloutRow, float]]:
    """Return rollouts with their advantages; rank 0 gets the even ones, rank 1 the odd ones."""
    rows = [
        make_row("a", lengths=[3, 1, 8], vocab=V),
        make_row("b", lengths=[5], vocab=V),
        make_row("c", lengths=[1, 1, 1, 1, 2, 20], vocab=V),
        make_row("d", lengths=[2, 2], vocab=V, temperature=0.6),
        make_row("e", lengths=[1, 1], vocab=V, temperature=0.0),
    ]
    if loss == "reinforce":
        # rows for the dense head, on one rank only
        rows[2] = make_row("c", lengths=[4] * 3, kind="top", vocab=V)
        rows[4] = make_row("e", lengths=[1] * 2, kind="none", vocab=V)
    return list(zip(rows, [0.5, -1.0, 2.0, 0.25, -0.75], strict=True))


def micro_batches(loss: str, rank: int, world_size: int) -> list[RolloutBatch]:
    """Return one rank's two micro-batches; rank 1's last holds no loss token."""
    items = global_batch(loss)
    total = float(sum(row.token_ids.size for row, _ in items))
    mine = items[rank::world_size]
    cut = max(len(mine) - 1, 1)
    batches = []
    for part in (mine[:cut], mine[cut:]):
        rows, advantages = [row for row, _ in part], [advantage for _, advantage in part]
        batch = pack_rollouts(rows, advantages, global_denominator=total)
        spared = torch.tensor([row.prompt_key == SPARED for row in rows])
        batches.append(replace(batch, loss_mask=~spared[batch.rollout_index]))
    return batches


def gradients(
    model: Model, batches: list[RolloutBatch], config: LossConfig, *, gather: bool
) -> tuple[float, dict[str, Tensor]]:
    """Return this rank's share of the loss, and the whole gradients."""
    total = 0.0
    for batch in batches:
        plan = plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float64)
        if gather:
            weight = whole_weight(model.lm_head.weight)
            inputs = score_batch(model.body(batch), weight, batch, plan)
            loss = compute_loss(inputs, config).loss
        else:
            loss = model(batch, plan, config)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return total, found


def refusal(model: Model, batch: RolloutBatch, config: LossConfig) -> str:
    """Return what the head says to a DTensor."""
    plan = plan_batch(batch, config, vocab_size=V, weight_dtype=torch.float64)
    hidden = torch.zeros(batch.num_scored, H, dtype=torch.float64)
    try:
        score_batch(hidden, model.lm_head.weight, batch, plan)
    except ValueError as error:
        return str(error)
    return "taken"


def find_facts(rank: int, world_size: int) -> dict[str, object]:
    """Return losses and gradients of every way and every loss, by name."""
    facts: dict[str, object] = {}
    for loss, config in LOSSES.items():
        batches = micro_batches(loss, rank, world_size)
        for way in ("gathered", "inside", "tied"):
            model = Model(tied=way == "tied")
            if world_size > 1:
                # without a mesh it takes the devices of a machine that has some
                mesh = init_device_mesh("cpu", (world_size,))
                for module in (model.body, model.lm_head) if way == "gathered" else (model,):
                    fully_shard(module, mesh=mesh)
                assert isinstance(model.lm_head.weight, DTensor)
                sum_gradients(model)
                if loss == "icepop" and way == "gathered":
                    facts["refusal"] = refusal(model, batches[0], config)
            value, found = gradients(model, batches, config, gather=way == "gathered")
            if world_size > 1:
                share = torch.tensor(value, dtype=torch.float64)
                dist.all_reduce(share)
                value = float(share)
            grads = {name: grad.tolist() for name, grad in found.items()}
            facts[f"{loss} {way}"] = {"loss": value, "grads": grads}
    return facts


def main(folder: Path, rank: int, world_size: int) -> None:
    """Find the facts as one rank of a world, and write them as rank 0."""
    if world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=240),
        )
    try:
        facts = find_facts(rank, world_size)
        if rank == 0:
            (folder / f"facts{world_size}.json").write_text(json.dumps(facts))
        if world_size > 1:
            # nobody leaves while another one works; after an error nobody waits either
            dist.barrier()
    finally:
        if world_size > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    # DTensor's caches keep the group and its threads beyond its end; one that drops the tensor of
    # the last collective while the interpreter is taken down aborts the process: take none down
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
