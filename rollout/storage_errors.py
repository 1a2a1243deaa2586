"""What an error of a storage means: whether to repeat the call, and what to tell a person."""

from __future__ import annotations

import re
from typing import Any, Final

from rollout.redact import redact

# asking again does not help with these
_FINAL_ERRORS: Final = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
# errors of a storage's own client, none of them an OSError
_CLIENT_MODULES: Final = ("botocore", "aiobotocore", "aiohttp", "google", "gcsfs", "azure", "adlfs")
_EXPIRED: Final = re.compile(r"expired|TokenRefreshRequired", re.IGNORECASE)


def says_exists(error: BaseException) -> bool:
    """Whether a create-only put failed because the file is there."""
    return isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")


def is_storage_error(error: BaseException) -> bool:
    """Whether an error comes from a storage and not from a mistake in the code."""
    return isinstance(error, OSError) or type(error).__module__.startswith(_CLIENT_MODULES)


def may_pass(error: BaseException) -> bool:
    """Whether repeating the call may help; expired credentials may be renewed meanwhile."""
    if _EXPIRED.search(_code(error)):
        return True
    return is_storage_error(error) and not isinstance(error, _FINAL_ERRORS)


def explain(error: BaseException | None, options: dict[str, Any]) -> str:
    """Describe an error in one line without the secrets that the options may hold."""
    text = f"{type(error).__name__}: {error}" if error is not None else "unknown"
    if error is not None and _EXPIRED.search(f"{_code(error)} {text}"):
        text = f"credentials expired: {text}"
    return redact(text, options)


def _code(error: BaseException) -> str:
    """The error code of an object store's answer, where there is one."""
    chain: list[BaseException | None] = [error, error.__cause__, error.__context__]
    for link in chain:
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""
