"""The capturing worker on CUDA."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from rollout.capture.worker import CaptureWorkerMixin


class GPUCaptureWorker(CaptureWorkerMixin, Worker):  # type: ignore[misc]
    """`worker_cls` on CUDA."""
