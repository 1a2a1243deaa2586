"""Where a training run's numbers go: a line a step, JSON lines, and TensorBoard if it is there."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from rollout.errors import OutputError

METRICS_FILE = "metrics.jsonl"
_SHOWN = ("loss", "grad_norm", "ratio_mean", "k3", "masked_share", "tokens_per_second", "reward")


class MetricsLog:
    """Appends each step's numbers to every place.

    A run that goes on from a checkpoint first drops the lines of later steps from the file, so that
    it holds each step once.
    """

    def __init__(self, output: Path, *, first_step: int, stream: IO[str] | None = None) -> None:
        """Open the places.

        Args:
            output: the run's folder.
            first_step: steps done so far.
            stream: where the lines for people go; standard output by default.

        Raises:
            OutputError: the file can't be written.
        """
        self._stream = stream or sys.stdout
        path = output / METRICS_FILE
        try:
            output.mkdir(parents=True, exist_ok=True)
            kept = [line for line in _lines(path) if json.loads(line)["step"] <= first_step]
            path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")
        except (OSError, ValueError, KeyError) as error:
            raise OutputError(f"{path} can't be written: {error!r}") from error
        self._board = _tensorboard(output, first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step.

        Args:
            step: from 1; 0 is before the first.
            values: by name; a NaN, a mean over nothing, becomes null.
        """
        plain = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **plain}, allow_nan=False) + "\n")
        self._file.flush()
        shown = "  ".join(f"{name} {values[name]:.4g}" for name in _SHOWN if name in values)
        print(f"step {step}  {shown}", file=self._stream, flush=True)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"replay/{name}", value, step)

    def close(self) -> None:
        """Close the places."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _tensorboard(output: Path, first_step: int) -> Any:
    """Return a writer where TensorBoard is installed, else None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(output / "tensorboard"), purge_step=first_step + 1)
