"""Refuse inputs whose tokens, supports and settings don't belong together.

These are faults of a program or of a dataset, in contrast to values that are impossible in single
tokens, which `rollout.loss_rows` counts and leaves out. They cost two waits for a device.
"""

# N scored tokens, E support entries of all rows

from __future__ import annotations

import torch

from rollout.loss_rows import any_of, entry_rows_of, is_mass, support_kinds
from rollout.loss_types import LossConfig, LossInputs


def check_inputs(inputs: LossInputs, config: LossConfig) -> None:
    """Check a micro-batch against its loss.

    Args:
        inputs: one micro-batch.
        config: says which kinds of support every term needs.

    Raises:
        ValueError: offsets are not those of E entries, a row's support is of another kind than the
            config needs, values are unnormalised where they are read alone, or a sampled id is not
            exactly once in its exact support.
    """
    _check_offsets(inputs)
    _check_alignment(inputs, config)


def _check_offsets(inputs: LossInputs) -> None:
    """Raise ValueError unless the offsets start at 0, never fall, and end at the entries."""
    offsets = inputs.support_offsets.long()
    num_entries = inputs.trainer_support_logprobs.shape[0]
    lowest = offsets.diff().min() if offsets.numel() > 1 else offsets.new_zeros(())
    first, last, least = torch.stack([offsets[0], offsets[-1], lowest]).tolist()
    if first != 0 or last != num_entries or least < 0:
        raise ValueError(
            f"support_offsets go from {first} to {last} with a smallest step of {least}, "
            f"expected 0 to {num_entries} entries, never falling"
        )


def _check_alignment(inputs: LossInputs, config: LossConfig) -> None:
    """Raise ValueError where tokens, supports and settings don't belong together."""
    kinds, needs = support_kinds(inputs), config.support_kinds
    # a mass that is none says nothing of the kind: such a token is counted as impossible
    scored = inputs.loss_mask & is_mass(inputs.sampler_tail_mass)
    none = torch.zeros_like(scored)
    wrong_kind = scored & any_of(kinds, frozenset(kinds) - needs) if needs else none
    no_tail = scored & kinds["head"] if "head" in needs else none
    if inputs.trainer_tail_mass is not None:
        no_tail = none
    raw = none
    if inputs.trainer_is_normalised is not None and not config.cancels_normaliser:
        # whatever their values: logits look impossible as log-probabilities
        raw = inputs.loss_mask & ~inputs.trainer_is_normalised
    hits = torch.ones_like(scored, dtype=torch.int64)
    if inputs.target_ids is not None and inputs.support_ids is not None:
        entry_row = entry_rows_of(inputs)
        same = inputs.support_ids.long() == inputs.target_ids.long()[entry_row]
        hits = torch.zeros_like(hits).index_add(0, entry_row, same.long())
    # also where values are impossible: a trainer that misses the id reports it as log p = -inf
    missing = inputs.loss_mask & kinds["exact"] & (hits != 1)

    faults = torch.stack([rows.sum() for rows in (wrong_kind, no_tail, raw, missing)]).tolist()
    if faults[0]:
        raise ValueError(
            f"{faults[0]} tokens carry another kind of support than centering "
            f"{config.centering!r} and kl_estimator {config.kl_estimator!r} use, expected "
            f"{' or '.join(sorted(needs))}; choose the estimator that fits the capture"
        )
    if faults[1]:
        raise ValueError(
            f"trainer_tail_mass is missing for {faults[1]} tokens with a tail, expected the "
            "trainer's mass outside the recorded head, from a dense log-sum-exp"
        )
    if faults[2]:
        raise ValueError(
            f"{faults[2]} tokens carry unnormalised trainer values, expected log-probabilities: "
            "only plain reinforce with exact or sampled centering cancels the normaliser"
        )
    if faults[3] and inputs.target_ids is not None:
        row = int(missing.nonzero()[0, 0])
        raise ValueError(
            f"token {row}: sampled id {int(inputs.target_ids[row])} stands {int(hits[row])} times "
            "in its support, expected exactly once: the ids and the supports are misaligned"
        )
