"""A loader's state: one global position, and what it is a position in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from rollout.errors import ConfigError
from rollout.loader_config import LoaderConfig
from rollout.pinned import PinnedDataset
from rollout.scalars import Where

STATE_VERSION: Final = 2


class Cursor(NamedTuple):
    """A position in the endless sequence of global micro-batches."""

    epoch: int = 0
    step: int = 0
    done: int = 0
    """Micro-batches of the step that are taken, over all ranks."""


_KEYS: Final = ("datasets", "settings", "where", *Cursor._fields)


def make_state(
    datasets: Sequence[PinnedDataset],
    config: LoaderConfig,
    where: Where | None,
    cursor: Cursor,
    lag: int | None = None,
) -> dict[str, Any]:
    """Return a state, in plain JSON.

    Args:
        datasets: what is read.
        config: what decides the batches.
        where: what rows are selected by.
        cursor: the position.
        lag: in a worker process, how many of the rank's next micro-batches are other workers'.
    """
    settings = dataclasses.asdict(config)
    for name in ("weights", "columns"):
        settings[name] = None if settings[name] is None else list(settings[name])
    state: dict[str, Any] = {
        "version": STATE_VERSION,
        "datasets": [dataset.state() for dataset in datasets],
        "settings": settings,
        "where": None if where is None else str(where),
        **cursor._asdict(),
    }
    return state if lag is None else {**state, "lag": lag}


def read_state(
    state: Mapping[str, Any],
    datasets: Sequence[PinnedDataset],
    config: LoaderConfig,
    where: Where | None,
) -> tuple[LoaderConfig, Cursor, int | None, list[PinnedDataset]]:
    """Compare a state with a loader's datasets and settings.

    Args:
        state: from `make_state`.
        datasets: those of the loader, as they are now.
        config: the loader's; `splits` of 0 takes the state's.
        where: the loader's.

    Returns:
        The settings, the position, the lag, and the datasets with the state's shards alone.

    Raises:
        DatasetError: another dataset, or a shard of the state is gone or another one.
        ConfigError: no state, another version of one, or other settings.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"loader state is {state!r:.80}, expected what state_dict() returned")
    if state.get("version") != STATE_VERSION:
        raise ConfigError(
            f"loader state has version {state.get('version')}, expected {STATE_VERSION}"
        )
    missing = [name for name in _KEYS if name not in state]
    if missing:
        raise ConfigError(f"loader state has no {missing[0]}, expected what state_dict() returned")
    if len(state["datasets"]) != len(datasets):
        raise ConfigError(
            f"loader state is of {len(state['datasets'])} datasets, expected {len(datasets)}"
        )
    restricted = [
        dataset.restricted(found)
        for dataset, found in zip(datasets, state["datasets"], strict=True)
    ]
    own = make_state(restricted, config, where, Cursor())
    if config.splits == 0:
        own["settings"]["splits"] = state["settings"].get("splits")
    pairs = [(name, state["settings"].get(name), value) for name, value in own["settings"].items()]
    for name, got, expected in [*pairs, ("where", state["where"], own["where"])]:
        if got != expected:
            raise ConfigError(
                f"loader state has {name} {got!r}, expected {expected!r}: "
                "load it with the settings it was saved with"
            )
    cursor = Cursor(epoch=state["epoch"], step=state["step"], done=state["done"])
    config = dataclasses.replace(config, splits=own["settings"]["splits"])
    return config, cursor, state.get("lag"), restricted
