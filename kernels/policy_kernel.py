"""The kernel of a policy loss: one program does a row, its sampled token and its entries.

`rollout.kernels.policy_rows` launches it and says what it computes.
"""

from __future__ import annotations

import triton
import triton.language as tl

# N rows, E entries of all rows


@triton.jit
def expm1(x):
    """Return exp(x) - 1 to the last digits of float32 also near 0."""
    # where the difference would cancel, a series whose first term left out is below 1e-8 of it
    series = 1.0 + x / 7.0 * (1.0 + x / 8.0 * (1.0 + x / 9.0))
    series = 1.0 + x / 4.0 * (1.0 + x / 5.0 * (1.0 + x / 6.0 * series))
    series = x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * series))
    return tl.where(tl.abs(x) < 0.5, series, tl.exp(x) - 1.0)


@triton.jit
def _trusted(log_p, log_q, log_low, log_high, gap, LOSS: tl.constexpr):
    keep = log_p == log_p
    if LOSS == "icepop":
        keep = (log_p - log_q >= log_low) & (log_p - log_q <= log_high)
    if LOSS == "ipo":
        larger, smaller = tl.maximum(log_p, log_q), tl.minimum(log_p, log_q)
        keep = tl.exp(larger) * -expm1(smaller - larger) <= gap
    return keep


@triton.jit
def _ratio_kl(log_ratio, log_cap):
    # r - 1 - log r and r log r - r + 1, with their derivatives by log r, r capped straight through
    capped = tl.minimum(log_ratio, log_cap)
    ratio, less_one = tl.exp(capped), expm1(capped)
    return less_one - capped, ratio * capped - less_one, less_one, ratio * capped


@triton.jit
def _count_entries(
    log_p_ptr, log_q_ptr, start, end, min_log_p, max_log_p, min_log_q, max_log_q,
    BLOCK: tl.constexpr,
):  # fmt: skip
    num_real = tl.zeros((BLOCK,), tl.int32)
    num_bad = tl.zeros((BLOCK,), tl.int32)
    for begin in range(start, end, BLOCK):
        entry = begin + tl.arange(0, BLOCK).to(tl.int64)
        inside = entry < end
        log_p = tl.load(log_p_ptr + entry, mask=inside, other=0.0).to(tl.float32)
        log_q = tl.load(log_q_ptr + entry, mask=inside, other=float("-inf")).to(tl.float32)
        # not (a < b) rather than a >= b: NaN is an entry, and an impossible one
        real = (log_q < min_log_q) == 0
        good = (log_q <= max_log_q) & (log_p >= min_log_p) & (log_p <= max_log_p)
        num_real += real.to(tl.int32)
        num_bad += (real & (good == 0)).to(tl.int32)
    return tl.sum(num_real), tl.sum(num_bad)


@triton.jit
def _tail_numbers(
    sampler_tail, trainer_tail, log_low, log_high, log_cap, floor,
    LOSS: tl.constexpr, CENTERING: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    # rho = Q_T / P_T, its log, and alpha = rho f(1 / rho); nothing to add where there is no tail
    has_tail = sampler_tail > 0.0
    rho = tl.maximum(sampler_tail, floor) / tl.maximum(trainer_tail, floor)
    rho = tl.where(has_tail, rho, 1.0)
    log_rho = tl.log(rho)
    alpha = rho
    if LOSS == "icepop":
        alpha = tl.where((-log_rho >= log_low) & (-log_rho <= log_high), 1.0, 0.0)
    if LOSS == "truncated":
        alpha = tl.exp(tl.minimum(log_rho + log_cap, 0.0))
    alpha = tl.where(has_tail & (CENTERING == "tail"), alpha, 0.0)
    rho = tl.where(has_tail & (KL == "tail"), rho, 0.0)
    return alpha, rho, tl.where(rho > 0.0, log_rho, 0.0)


@triton.jit
def _centering_mass(
    log_p, log_q, p, q, draws, uniform, alpha, log_low, log_high, gap, log_cap,
    LOSS: tl.constexpr, CENTERING: tl.constexpr,
):  # fmt: skip
    keep = _trusted(log_p, log_q, log_low, log_high, gap, LOSS)
    mass = q
    if LOSS != "plain":
        mass = tl.exp(tl.minimum(log_p, log_q + log_cap))
    mass = tl.where(keep, mass, 0.0) - alpha * p
    if CENTERING == "sampled":
        # uniform weights: a draw already comes with probability q
        drawn = q * 0.0 + uniform
        if LOSS != "plain":
            drawn = uniform * tl.exp(tl.minimum(log_p - log_q, log_cap))
        mass = tl.where(draws, tl.where(keep, drawn, 0.0), mass)
    return mass


@triton.jit
def _kl_terms(ratio, p, q, draws, uniform, rho, log_rho, log_cap, KL: tl.constexpr):
    value_qp, value_pq = -q * ratio, p * ratio
    slope_qp, slope_pq = rho * p - q, p * (ratio + log_rho)
    if KL == "sampled":
        _, drawn_pq, _, drawn_slope = _ratio_kl(ratio, log_cap)
        value_qp = tl.where(draws, -uniform * ratio, value_qp)
        value_pq = tl.where(draws, uniform * drawn_pq, value_pq)
        slope_qp = tl.where(draws, -uniform, slope_qp)
        slope_pq = tl.where(draws, uniform * drawn_slope, slope_pq)
    return value_qp, value_pq, slope_qp, slope_pq


@triton.jit
def policy_rows_kernel(
    log_p_ptr,
    entry_log_p_ptr,
    entry_log_q_ptr,
    log_q_ptr,
    offsets_ptr,
    advantages_ptr,
    mask_ptr,
    valid_ptr,
    is_samples_ptr,
    sampler_tail_ptr,
    trainer_tail_ptr,
    is_normalised_ptr,
    weights_ptr,
    terms_ptr,
    counts_ptr,
    log_ratio_ptr,
    usable_ptr,
    grads_ptr,
    entry_grads_ptr,
    num_rows,
    log_low,
    log_high,
    gap,
    log_weight_cap,
    log_kl_cap,
    tail_floor,
    advantage_scale,
    kl_q_p,
    kl_p_q,
    min_log_p,
    max_log_p,
    min_log_q,
    max_log_q,
    max_mass,
    LOSS: tl.constexpr,
    CENTERING: tl.constexpr,
    KL: tl.constexpr,
    USE_EXACT: tl.constexpr,
    USE_HEAD: tl.constexpr,
    USE_DRAWS: tl.constexpr,
    CANCELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's terms, counts and derivatives."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets_ptr + row)
    end = tl.load(offsets_ptr + row + 1)
    log_p = tl.load(log_p_ptr + row).to(tl.float32)
    log_q = tl.load(log_q_ptr + row).to(tl.float32)
    advantage = tl.load(advantages_ptr + row).to(tl.float32)
    weight = tl.load(weights_ptr + row).to(tl.float32)
    sampler_tail = tl.load(sampler_tail_ptr + row).to(tl.float32)
    trainer_tail = tl.load(trainer_tail_ptr + row).to(tl.float32)
    scored = tl.load(mask_ptr + row) != 0
    valid = tl.load(valid_ptr + row) != 0
    normalised = tl.load(is_normalised_ptr + row) != 0
    draws = valid & (tl.load(is_samples_ptr + row) != 0)
    exact = valid & (draws == 0) & (sampler_tail == 0.0)
    # a NaN tail mass is that of a head
    head = valid & (draws == 0) & (exact == 0)

    # what a real token can't have: all of these are False for NaN
    possible = (log_p >= min_log_p) & (log_p <= max_log_p)
    possible = possible & (log_q >= min_log_q) & (log_q <= max_log_q)
    possible = possible & (tl.abs(advantage) < float("inf")) & (tl.abs(weight) < float("inf"))
    supported = scored
    if not CANCELS:
        supported = supported & normalised
    num_real = 0
    if USE_EXACT or USE_HEAD or USE_DRAWS:
        num_real, num_bad = _count_entries(
            entry_log_p_ptr, entry_log_q_ptr, start, end, min_log_p, max_log_p, min_log_q,
            max_log_q, BLOCK=BLOCK,
        )  # fmt: skip
        trainers = (trainer_tail >= 0.0) & (trainer_tail <= max_mass)
        tails = (sampler_tail >= 0.0) & (sampler_tail <= max_mass) & (trainers | (head == 0))
        possible = possible & ((valid == 0) | ((num_bad == 0) & (tails | draws)))
        kind = (exact & USE_EXACT) | (head & USE_HEAD) | (draws & USE_DRAWS)
        supported = supported & kind & (num_real > 0)
    usable = scored & possible & supported

    log_p = tl.where(usable, log_p, 0.0)
    log_q = tl.where(usable, log_q, 0.0)
    weight = tl.where(usable, weight, 0.0)
    scale = tl.where(usable, advantage, 0.0) * advantage_scale * weight
    sampler_tail = tl.where(usable & head, sampler_tail, 0.0)
    trainer_tail = tl.where(usable & head, trainer_tail, 0.0)
    keep = usable & _trusted(log_p, log_q, log_low, log_high, gap, LOSS)
    importance = weight * 0.0 + 1.0
    if LOSS != "plain":
        importance = tl.exp(tl.minimum(log_p - log_q, log_weight_cap))
    importance = tl.where(keep, importance, 0.0)
    policy, grad = -scale * importance, -scale * importance
    if LOSS == "plain" or LOSS == "truncated":
        policy *= log_p

    correction, size, kl_qp, kl_pq = weight * 0.0, weight * 0.0, weight * 0.0, weight * 0.0
    if KL == "token":
        kl_qp, kl_pq, slope_qp, slope_pq = _ratio_kl(log_p - log_q, log_kl_cap)
        grad += weight * (kl_q_p * slope_qp + kl_p_q * slope_pq)
    if USE_EXACT or USE_HEAD or USE_DRAWS:
        uniform = 1.0 / tl.maximum(num_real, 1).to(tl.float32)
        alpha, rho, log_rho = _tail_numbers(
            sampler_tail, trainer_tail, log_low, log_high, log_weight_cap, tail_floor,
            LOSS, CENTERING, KL,
        )  # fmt: skip
        if KL != "token":
            kl_qp, kl_pq = sampler_tail * log_rho, -trainer_tail * log_rho
        for begin in range(start, end, BLOCK):
            entry = begin + tl.arange(0, BLOCK).to(tl.int64)
            inside = entry < end
            e_log_p = tl.load(entry_log_p_ptr + entry, mask=inside, other=0.0).to(tl.float32)
            e_log_q = tl.load(entry_log_q_ptr + entry, mask=inside, other=float("-inf"))
            use = usable & (e_log_q.to(tl.float32) >= min_log_q)
            e_log_p = tl.where(use, e_log_p, 0.0)
            e_log_q = tl.where(use, e_log_q.to(tl.float32), 0.0)
            p, q = tl.exp(e_log_p), tl.exp(e_log_q)
            e_grad = tl.zeros((BLOCK,), tl.float32)
            if CENTERING != "off":
                mass = _centering_mass(
                    e_log_p, e_log_q, p, q, draws, uniform, alpha, log_low, log_high, gap,
                    log_weight_cap, LOSS, CENTERING,
                )  # fmt: skip
                mass = tl.where(use, mass, 0.0)
                correction += tl.sum(mass * e_log_p)
                size += tl.sum(tl.abs(mass))
                e_grad += scale * mass
            if KL == "exact" or KL == "tail" or KL == "sampled":
                value_qp, value_pq, slope_qp, slope_pq = _kl_terms(
                    e_log_p - e_log_q, p, q, draws, uniform, rho, log_rho, log_kl_cap, KL
                )
                kl_qp += tl.sum(tl.where(use, value_qp, 0.0))
                kl_pq += tl.sum(tl.where(use, value_pq, 0.0))
                slope = weight * (kl_q_p * slope_qp + kl_p_q * slope_pq)
                e_grad += tl.where(use, slope, 0.0)
            tl.store(entry_grads_ptr + entry, e_grad, mask=inside)

    tl.store(terms_ptr + row, policy)
    tl.store(terms_ptr + num_rows + row, scale * correction)
    tl.store(terms_ptr + 2 * num_rows + row, weight * (kl_q_p * kl_qp + kl_p_q * kl_pq))
    tl.store(terms_ptr + 3 * num_rows + row, kl_qp)
    tl.store(terms_ptr + 4 * num_rows + row, kl_pq)
    tl.store(terms_ptr + 5 * num_rows + row, size)
    lacking = scored & possible & (supported == 0)
    tl.store(counts_ptr + row, scored.to(tl.int32))
    tl.store(counts_ptr + num_rows + row, (scored & (possible == 0)).to(tl.int32))
    tl.store(counts_ptr + 2 * num_rows + row, lacking.to(tl.int32))
    tl.store(counts_ptr + 3 * num_rows + row, (usable & (keep == 0)).to(tl.int32))
    tl.store(log_ratio_ptr + row, tl.where(usable & normalised, log_p - log_q, float("nan")))
    tl.store(usable_ptr + row, usable.to(tl.int8))
    tl.store(grads_ptr + row, grad)
