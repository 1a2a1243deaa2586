"""The proof after each reload: the engine sampled with the weights that it was told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Prover:
    """Compares what an engine recorded with the trainer's probabilities on the same weights."""

    def __init__(self, *, compute_dtype: str, tolerance: float, k3_tolerance: float) -> None:
        """Load nothing.

        Args:
            compute_dtype: Of the trainer.
            tolerance: Largest |p / q - 1| of a token.
            k3_tolerance: Largest mean of r - 1 - log r over the tokens, r = p / q, nats.
        """
        self._compute_dtype = compute_dtype
        self._tolerance = tolerance
        self._k3_tolerance = k3_tolerance
        self._loaded: tuple[Path, Any] | None = None

    def prove(self, output: Path, policy: Path) -> Any:
        """Compare a dataset's first rollouts with the weights that should have sampled them.

        Args:
            output: The dataset.
            policy: The checkpoint.

        Returns:
            A `rollout.agreement.AgreementReport`.

        Raises:
            TrainingError: They do not agree.
        """
        from rollout.agreement import measure_agreement
        from rollout.dataset_view import read_dataset
        from rollout.errors import TrainingError
        from rollout.replay_model import load_model
        from rollout.storage import Storage

        if self._loaded is None or self._loaded[0] != policy:
            self._loaded = None  # before another one is loaded
            model = load_model(
                policy, revision=None, compute_dtype=self._compute_dtype, device="auto"
            )
            self._loaded = (policy, model)
        view = read_dataset(Storage.open(output))
        report = measure_agreement(self._loaded[1], view, max_rollouts=256)
        report.check(self._tolerance)
        if not report.replayed.k3 <= self._k3_tolerance:
            raise TrainingError(
                f"the weights do not agree with the data: k3 is {report.replayed.k3:.3g}, "
                f"expected at most {self._k3_tolerance:g}"
            )
        return report
