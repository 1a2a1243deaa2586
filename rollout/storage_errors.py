"""What an error of a storage means: whether to repeat the call, and what to tell a person."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import tenacity

from rollout.redact import redact

_Result = TypeVar("_Result")

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
_NO_CREDENTIALS: Final = ("NoCredentialsError", "PartialCredentialsError")
_EXPIRED: Final = re.compile(r"expired|TokenRefreshRequired", re.IGNORECASE)


def says_exists(error: BaseException) -> bool:
    """Whether a create-only put failed because the file is there."""
    return isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412")


def is_storage_error(error: BaseException) -> bool:
    """Whether an error comes from a storage and not from a mistake in the code."""
    return isinstance(error, OSError) or type(error).__module__.startswith(_CLIENT_MODULES)


def may_pass(error: BaseException, *, answered: bool = True) -> bool:
    """Whether repeating the call may help; expired credentials may be renewed meanwhile.

    Args:
        error: why the call failed.
        answered: whether the storage has taken a call before: credentials that were never there
            do not come by waiting, those that were may come back.
    """
    if _EXPIRED.search(_code(error)):
        return True
    if not answered and type(error).__name__ in _NO_CREDENTIALS:
        return False
    return is_storage_error(error) and not isinstance(error, _FINAL_ERRORS)


def repeat(
    function: Callable[[], _Result],
    seconds: float,
    given_up: threading.Event,
    before_sleep: Callable[[tenacity.RetryCallState], None],
    answered: bool,
) -> _Result:
    """Call a function again, at growing intervals, while that may help.

    Args:
        function: what to call.
        seconds: after which its error is raised.
        given_up: raises its error at once, also while waiting.
        before_sleep: called before each wait.
        answered: see `may_pass`.
    """
    retrying = tenacity.Retrying(
        stop=tenacity.stop_any(
            tenacity.stop_after_delay(seconds), tenacity.stop_when_event_set(given_up)
        ),
        sleep=tenacity.sleep_using_event(given_up),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=15),
        retry=tenacity.retry_if_exception(functools.partial(may_pass, answered=answered)),
        before_sleep=before_sleep,
        reraise=True,
    )
    return retrying(function)


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
