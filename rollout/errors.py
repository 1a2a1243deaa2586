"""Every error that a caller or an operator may want to catch.

Each is also the standard-library type that fits, is raised with one sentence (what, got, expected,
what to do), and survives the way between processes. `exit_code` is what the command line ends with.
"""

from __future__ import annotations


class RolloutError(Exception):
    """Base of all errors raised on purpose."""

    exit_code = 1


class ConfigError(RolloutError, ValueError):
    """Raised when the job file or an override is wrong, or asks for what can't be done."""

    exit_code = 2


class InputError(RolloutError, ValueError):
    """Raised when the model, the prompts or the reward function can't be read."""

    exit_code = 3


class OutputError(RolloutError, OSError):
    """Raised when the output can't be written, or holds another run."""

    exit_code = 4


class EngineError(RolloutError, RuntimeError):
    """Raised when vLLM can't start or dies."""

    exit_code = 5


class IncompleteError(RolloutError, RuntimeError):
    """Raised when a job ends without the rollouts that it was asked for."""

    exit_code = 6


class DatasetError(RolloutError, ValueError):
    """Raised when a dataset can't be read: not one, a newer format, a bad digest."""

    exit_code = 7


class TrainingError(RolloutError, RuntimeError):
    """Raised when training can't go on: not finite, or weights that do not agree with the data."""

    exit_code = 8


class StoppedError(RolloutError, RuntimeError):
    """Raised when a signal asked a job to leave; what was finished is committed."""

    exit_code = 9


class TooManyFailedError(IncompleteError):
    """Raised when a larger share of a job's rollouts failed than it allows."""

    exit_code = 10


class DamagedError(DatasetError):
    """Raised when `rollout verify` finds a part of a dataset damaged or missing."""

    exit_code = 11
