"""One rank of a process group that iterates a loader: tests/test_loader_ranks.py starts several.

Every batch is followed by a collective, so ranks with different numbers of batches would hang.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from loader_cases import open_loader


def main(url: str, store: str, rank: int, world_size: int, settings: str) -> None:
    """Print, for each of two epochs, this rank's batches as [step, micro_batch, rollout ids]."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    loader = open_loader(url, **json.loads(settings))
    epochs = []
    for _ in range(2):
        found = []
        for batch in loader:
            # whatever the others hold, they are in the same step and share its denominator
            own = [batch.step, batch.micro_batch, batch.global_denominator]
            place = torch.tensor([*own, float(batch.loss_mask.sum())], dtype=torch.float64)
            dist.all_reduce(place)
            *shared, _ = place.tolist()
            assert shared == [value * world_size for value in own]
            found.append([batch.step, batch.micro_batch, list(batch.rollout_ids)])
        epochs.append(found)
    print(json.dumps({"steps": loader.num_steps, "epochs": epochs}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
