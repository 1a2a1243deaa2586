"""The quickstart task: write the letters of a word in reverse order.

`reverse_reward` is the reward function that job.yaml names. The rest of the module says which words
exist and which of them training never sees, so that the model, the prompts and the tests agree.
Only the standard library is needed: the generate job imports this file in its own process.
"""

from __future__ import annotations

import random
from difflib import SequenceMatcher
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS = 6
MAX_LETTERS = 16
# a completion is at most the reversed word and the end-of-sequence token; a little room to ramble
MAX_COMPLETION_TOKENS = 20
_HELD_OUT_MODULUS = 8


def reverse_reward(prompt: dict[str, Any], completion: str, token_ids: list[int]) -> float:
    """Score how similar a completion is to the expected answer.

    reward = 2 * M / (len(completion) + len(answer)), where M counts the letters in the matching
    blocks of the two strings (Ratcliff-Obershelp). It depends on its arguments alone, and case
    counts: a capital never matches a small letter.

    Args:
        prompt: The input row of the prompts file; its `answer` is the expected completion.
        completion: The decoded completion without special tokens.
        token_ids: The sampled ids, terminal token included; not used.

    Returns:
        A number in [0, 1]; 1 only when `completion` equals the answer.

    Raises:
        ValueError: The row has no `answer`, or one that is not text.
    """
    answer = prompt.get("answer")
    if not isinstance(answer, str):
        raise ValueError(
            f"prompt {prompt.get('id')!r}: `answer` is {type(answer).__name__}, expected text"
        )
    # autojunk would drop frequent letters from answers of 200 letters and more
    return SequenceMatcher(None, completion, answer, autojunk=False).ratio()


def is_held_out(word: str) -> bool:
    """Tell whether training never sees `word`.

    A word is held out when the alphabet positions of its letters (a = 0) add up to a multiple of 8,
    which is one word in eight. The rule reads the word alone, so no list has to be kept apart.

    Args:
        word: Small letters a to z.

    Returns:
        True for the words of the prompts file and of the final measurement.
    """
    return sum(LETTERS.index(letter) for letter in word) % _HELD_OUT_MODULUS == 0


def draw_word(rng: random.Random, *, held_out: bool) -> str:
    """Draw a word of 6 to 16 letters, each length and each letter equally likely.

    Args:
        rng: Source of randomness; the same state gives the same word.
        held_out: Which side of the split the word comes from.

    Returns:
        A word for which `is_held_out` equals `held_out`.
    """
    while True:
        length = rng.randint(MIN_LETTERS, MAX_LETTERS)
        word = "".join(rng.choices(LETTERS, k=length))
        if is_held_out(word) == held_out:
            return word
