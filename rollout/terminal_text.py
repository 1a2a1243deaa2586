"""Fit text into the columns of a terminal, where wide characters take two and some take none."""

from __future__ import annotations

import textwrap
import unicodedata
from typing import Final

WIDTH: Final = 100
"""Columns of everything that is printed."""


def printable(text: str) -> str:
    """Escape what a terminal would not print as it stands: control characters and line breaks."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def columns(text: str) -> int:
    """Count the columns that a text takes."""
    return sum(map(_columns_of, text))


def fit(text: str, width: int) -> str:
    """Cut a text to so many columns, at its end."""
    if columns(text) <= width:
        return text
    return _first_columns(text, width - 3) + "..."


def fit_middle(text: str, width: int) -> str:
    """Cut a text to so many columns: both ends of a path or a list say more than its middle."""
    if columns(text) <= width:
        return text
    half = (width - 3) // 2
    return f"{_first_columns(text, half)}...{fit_end(text, half)}"


def fit_end(text: str, width: int) -> str:
    """Keep the last columns of a text."""
    return _first_columns(text[::-1], width)[::-1]


def pad(text: str, width: int) -> str:
    """Cut or fill a text to so many columns."""
    text = fit(text, width)
    return text + " " * (width - columns(text))


def wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of at most so many columns; one empty line where there is none."""
    lines = textwrap.wrap(text, width) or [""]
    if any(columns(line) > width for line in lines):
        # wide characters: half as many of them
        lines = textwrap.wrap(text, width // 2)
    return lines


def bar(share: float, width: int) -> str:
    """Draw a share of 1 as a bar of `#`, empty below half a character."""
    return "#" * round(min(max(share, 0.0), 1.0) * width)


def _columns_of(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _first_columns(text: str, width: int) -> str:
    used = 0
    for index, char in enumerate(text):
        used += _columns_of(char)
        if used > width:
            return text[:index]
    return text
