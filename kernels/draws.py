"""Independent samples of the sampler's distribution beside the sampled token.

Draw k of a position is the inverse of q's cumulative distribution over ascending ids at a uniform
number with 106 random bits, so that an id of probability 1e-12 is drawn as often as it should be,
which float32 noise never does. The bits are one block of Philox 4x32-10 with the rollout's seed as
the key and (position, draw index, 0, DOMAIN) as the counter: the same seed gives the same draws on
any device and in any batch, and no other user of the seed (the engine's own sampler counts with a
last word of 0) ever sees these bits.
"""

from __future__ import annotations

import torch

DOMAIN = 0x64726177
"""Last word of the counter: "draw" in ASCII."""

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


def draw_bits(seeds: torch.Tensor, positions: torch.Tensor, num_draws: int) -> torch.Tensor:
    """Compute the random words of draws by Philox 4x32-10.

    Args:
        seeds: [N] int64, any bits.
        positions: [N] int64, output positions; the low 32 bits count.
        num_draws: draws of each row, K.

    Returns:
        [N, K, 4] int64 words in [0, 2**32).

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011).
    """
    key = [(seeds & _WORD)[:, None], ((seeds >> 32) & _WORD)[:, None]]
    index = torch.arange(num_draws, device=seeds.device)[None, :]
    zero = torch.zeros_like(index)
    words = [(positions & _WORD)[:, None] + zero, index + 0 * key[0], zero + 0 * key[0]]
    words.append(words[2] + DOMAIN)
    for _ in range(10):
        high0, low0 = _multiply_words(words[0], _PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply_words(words[2], _PHILOX_MULTIPLIERS[1])
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0]
        key = [(key[i] + _PHILOX_WEYL[i]) & _WORD for i in range(2)]
    return torch.stack(words, dim=-1)


def _multiply_words(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit words held in int64."""
    # in halves, since the product of two 32-bit words overflows int64
    low_part = (words & 0xFFFF) * factor
    high_part = (words >> 16) * factor + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def draws_reference(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Draw from one row by inverting its cumulative distribution, in plain torch.

    Args:
        logits: [V] any float dtype, without NaN and +inf, not all -inf.
        words: [K, 4] int64, of `draw_bits`.

    Returns:
        [K] int64 ids.
    """
    values = logits.double()
    weights = torch.exp(values - values.max())
    cumulative = torch.cumsum(weights, dim=0)
    targets = _uniform(words[:, 0], words[:, 1]) * cumulative[-1]
    # the first id whose cumulative weight exceeds the target: it has a positive weight
    ids = torch.searchsorted(cumulative, targets, right=True)
    return ids.clamp(max=int(weights.nonzero().max()))


def _uniform(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Turn two 32-bit words into a float64 in [0, 1) with 53 random bits."""
    return ((high >> 5) * 67108864 + (low >> 6)).double() * 2.0**-53
