"""Keep secrets out of what people read: messages, records, tables."""

from __future__ import annotations

import os
import re
from typing import Any, Final

_USER_INFO: Final = re.compile(r"(?<=//)[^/@\s'\"]*@")
_SIGNED: Final = re.compile(
    r"((?:X-Amz-(?:Signature|Credential|Security-Token)|Signature|sig|token)=)[^&\s'\"]+",
    re.IGNORECASE,
)
# options whose values help in a message; any other may be a secret
_HARMLESS: Final = re.compile(r"endpoint|region|profile|project")
_SECRET_VARIABLES: Final = re.compile(r"SECRET|TOKEN|PASSWORD|CREDENTIAL|_KEY\b|ACCESS_KEY")
_SHORTEST: Final = 6  # shorter values would blank out ordinary words


def public_url(url: str) -> str:
    """Return a URL without user, password and signatures."""
    return _SIGNED.sub(r"\1***", _USER_INFO.sub("", url))


def redact(text: str, options: dict[str, Any]) -> str:
    """Blank out what may be a secret.

    Args:
        text: a message, perhaps of another library.
        options: of a storage; any longer value that is not known to be harmless is a secret.
    """
    values = _strings(options)
    values += [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and _SECRET_VARIABLES.search(name)
    ]
    # the longest first: one may be a part of another
    for value in sorted(set(values), key=len, reverse=True):
        text = text.replace(value, "***")
    return public_url(text)


def _strings(value: Any, name: str = "") -> list[str]:
    """Every longer string in nested options that is not known to be harmless."""
    if isinstance(value, str):
        return [value] if len(value) >= _SHORTEST and not _HARMLESS.search(name) else []
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in _strings(item, str(key))]
    if isinstance(value, list | tuple):
        return [text for item in value for text in _strings(item, name)]
    return []
