"""The output head under FSDP2: how it takes a sharded weight, and how gradients add up.

The heads index rows of the weight, so they need all of it, in plain tensors. Two ways:

- Inside the forward of the module that `fully_shard` wraps, the weight is whole and plain already,
  and its gradient is reduced and sharded again by FSDP2. Tied embeddings need this one.
- Elsewhere the parameter is a DTensor, which the heads refuse; `whole_weight` gathers it, and its
  gradient is summed over the ranks. Every rank has to call it as often as the others.

The heads and the losses communicate nothing, so ranks may hold different kinds and numbers of rows.
A loss is divided by the denominator of the whole global batch: gradients of the ranks add up to
that of the batch, where FSDP2 takes their mean unless `sum_gradients` tells it otherwise. A rank
without any token left still has a loss with a graph, so it takes part in every collective.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial


def whole_weight(weight: Tensor) -> Tensor:
    """Gather a sharded weight; in the backward its gradients are summed over the ranks.

    A collective on every rank of the weight's mesh, forward and backward. `DTensor.full_tensor`
    alone would keep each rank's own gradient only.

    Args:
        weight: [V, H], a DTensor whose mesh dims all split tokens, as those of FSDP do; a plain
            tensor is returned as it is.

    Returns:
        [V, H], plain, in the dtype of the parameter; cast it where the hidden states are narrower.
    """
    if not isinstance(weight, DTensor):
        return weight
    each = [Partial("sum") for _ in range(weight.device_mesh.ndim)]
    whole: Tensor = weight.full_tensor(grad_placements=each)
    return whole


def sum_gradients(model: nn.Module) -> None:
    """Make FSDP2 add the ranks' gradients up instead of taking their mean.

    What a loss over a global denominator needs; otherwise every gradient is too small by the number
    of ranks.

    Args:
        model: holds modules that `fully_shard` has wrapped, at any depth.

    Raises:
        ValueError: it holds none.
    """
    wrapped = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not wrapped:
        raise ValueError(
            f"{type(model).__name__} holds no module of FSDP2, expected fully_shard before"
        )
    for module in wrapped:
        module.set_gradient_divide_factor(1.0)
