"""Which of how many ranks this process is."""

from __future__ import annotations

import os

import torch.distributed as dist

from rollout.errors import ConfigError


def resolve_rank(world_size: int | None, rank: int | None) -> tuple[int, int]:
    """Return world size and rank: as given, else from torch.distributed, else 1 and 0.

    Args:
        world_size: ranks that read different data; not the tensor- or sequence-parallel ones.
        rank: of this process among them.

    Raises:
        ConfigError: one is given without the other, the rank is out of range, or a launcher has
            started several processes and torch.distributed does not know it yet.
    """
    if (world_size is None) != (rank is None):
        raise ConfigError(
            f"world_size is {world_size} and rank is {rank}, expected both or neither"
        )
    if world_size is not None and rank is not None:
        if world_size < 1 or not 0 <= rank < world_size:
            raise ConfigError(f"rank is {rank}, expected 0 to below the world_size {world_size}")
        return world_size, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        raise ConfigError(
            f"the launcher started {launched} ranks (WORLD_SIZE) but torch.distributed is not "
            "initialised: every rank would read everything; initialise it first, or give "
            "world_size and rank"
        )
    return 1, 0
