"""The capturing worker of vLLM's CPU build, alone here since only that build has its base."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from rollout.capture.worker import CaptureWorkerMixin


class CPUCaptureWorker(CaptureWorkerMixin, CPUWorker):  # type: ignore[misc]
    """`worker_cls` on a machine without a GPU."""
