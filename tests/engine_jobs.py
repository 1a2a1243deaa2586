"""Jobs on the real CPU engine, for the tests that run them in-process."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rollout.capture.batch import BatchRows, RowCut
from rollout.capture.core import CaptureCore
from rollout.capture.request import KEPT
from rollout.capture.v2 import V2Adapter
from rollout.config import JobConfig
from rollout.jobfile import check_job
from rollout.kernels.support_cut import SupportCut, cut_reference
from rollout.storage import Storage


def write_prompts(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def make_job(model: Path, prompts: Path, output: str | Path, /, **sections: Any) -> JobConfig:
    """A job on the CPU engine; `sampling`, `engine` and the like override the defaults."""
    engine = {
        "max_num_seqs": 16,
        "max_model_len": 256,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 * 2**20,
    } | sections.pop("engine", {})
    data: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"} | sections.pop("model", {}),
        "prompts": {"path": str(prompts)} | sections.pop("prompts", {}),
        "sampling": {"max_tokens": 16} | sections.pop("sampling", {}),
        "capture": {"support_capacity": 2**18} | sections.pop("capture", {}),
        "output": {"path": str(output)} | sections.pop("output", {}),
        "engine": engine,
    }
    return check_job(data | sections)


def commit_files(output: str | Path) -> list[Path]:
    """The commit records of a local output, by name."""
    return sorted(Path(output, "_commit").glob("*.json.gz"))


def read_commit_file(path: Path) -> dict[str, Any]:
    """Read a commit record as anybody can."""
    record: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return record


def commit_keys(record: dict[str, Any]) -> list[tuple[str, int]]:
    """The prompt and the sample of each row of a record's shard."""
    counted = zip(record["prompt_keys"], record["prompt_rows"], strict=True)
    prompts = [key for key, rows in counted for _ in range(rows)]
    return list(zip(prompts, record["sample_indices"], strict=True))


def read_rows(output: str | Path) -> list[dict[str, Any]]:
    """Read every committed row with pyarrow alone, checksums verified, in the records' order.

    `request` is added: the start of the engine's request id.
    """
    root = Path(output)
    rows: list[dict[str, Any]] = []
    for path in commit_files(root):
        record = read_commit_file(path)
        if record["file"] is None:
            continue
        parquet = pq.ParquetFile(root / record["file"], page_checksum_verification=True)
        found: list[dict[str, Any]] = []
        for group in range(parquet.num_row_groups):
            found += parquet.read_row_group(group).to_pylist()
        for row, (key, index) in zip(found, commit_keys(record), strict=True):
            rows.append(row | {"request": f"{key[:16]}-{index}-"})
    return rows


def read_rejected(output: str | Path) -> list[dict[str, Any]]:
    """Read the rejected tables that the commit records name."""
    root = Path(output)
    rows: list[dict[str, Any]] = []
    for record in commit_files(root):
        file = read_commit_file(record)["rejected_file"]
        if file is not None:
            rows += pq.read_table(root / file).to_pylist()
    return rows


def unpack(entries: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Unpack entries by the format's text alone: ids, and the float32 bits above them."""
    packed = np.array(entries, np.uint64)
    ids = (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return ids, (packed >> np.uint64(32)).astype(np.uint32).view(np.float32)


@dataclass
class SeenLogits:
    """The masked logits of every sampled token, by (internal request id, output position)."""

    rows: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    cuts: dict[tuple[str, int], tuple[torch.Tensor, int, float]] = field(default_factory=dict)
    """Of those that the capture truncated, the logits before that, top-k and top-p."""
    at_border: int = 0
    """Rows of `cuts` that keep other ids than a sort in float64; `check_against_sampler` counts."""
    sampled: dict[tuple[str, int], int] = field(default_factory=dict)
    replaced: int = 0
    discarded: int = 0
    drawn: int = 0
    """Tokens that the capture drew."""
    drawn_otherwise: int = 0
    """Those of them that vLLM's own sampler, run beside it, drew differently."""


def masked_by_cut(logits: torch.Tensor, rows: BatchRows) -> torch.Tensor:
    """Mask logits [N, V] as the capture is to truncate them, by a sort."""
    if rows.noise is None or rows.noise.cut is None:
        return logits
    arrays = (rows.noise.cut.top_k, rows.noise.cut.top_p, rows.kinds == KEPT)
    top_k, top_p, kept = (torch.from_numpy(array).to(logits.device) for array in arrays)
    masked = cut_reference(logits, SupportCut(top_k=top_k, top_p=top_p))
    return torch.where(kept[:, None], masked, logits)


@contextmanager
def seen_logits() -> Iterator[SeenLogits]:
    """Keep the masked logits of each step.

    They are what vLLM's own top-k/top-p sampler returned, or its logits, truncated by a sort where
    it had left that to the capture.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    seen = SeenLogits()
    last: list[torch.Tensor] = []  # stays empty where another sampler runs, as on CUDA
    stock_forward, stock_on_step = TopKTopPSampler.forward_cpu, CaptureCore.on_step
    stock_on_draw, stock_draw = CaptureCore.on_draw, V2Adapter._draw

    def forward_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        sampled, masked = stock_forward(self, *args, **kwargs)
        last[:] = [masked.clone()]
        return sampled, masked

    def on_step(
        self: CaptureCore, logits: torch.Tensor, sampled: torch.Tensor, rows: BatchRows
    ) -> None:
        keep((last.pop() if last else logits.clone()).cpu(), sampled, rows)
        stock_on_step(self, logits, sampled, rows)

    def on_draw(self: CaptureCore, logits: torch.Tensor, rows: BatchRows) -> torch.Tensor | None:
        sampled = stock_on_draw(self, logits, rows)
        if sampled is not None:
            keep(masked_by_cut(logits.clone(), rows).cpu(), sampled, rows)
            assert rows.noise is not None
            if rows.noise.cut is not None:
                keep_cut(logits.cpu(), rows, rows.noise.cut)
        return sampled

    def draw(self: V2Adapter, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sampled = stock_draw(self, logits, *args, **kwargs)
        if self._taken:
            rows = self._rows()
            theirs = self._stock_draw(masked_by_cut(logits, rows), *args, **kwargs)
            counts = torch.from_numpy(rows.kinds != 0).to(theirs.device)
            seen.drawn += int(counts.sum())
            seen.drawn_otherwise += int((counts & (sampled != theirs)).sum())
        return sampled

    def keep_cut(logits: torch.Tensor, rows: BatchRows, cut: RowCut) -> None:
        for i in np.flatnonzero(rows.kinds == KEPT).tolist():
            key = (rows.request_ids[i], int(rows.positions[i]))
            seen.cuts[key] = (logits[i].clone(), int(cut.top_k[i]), float(cut.top_p[i]))

    def keep(masked: torch.Tensor, sampled: torch.Tensor, rows: BatchRows) -> None:
        for i, request_id in enumerate(rows.request_ids):
            if rows.kinds[i] == 0:
                seen.discarded += 1
                continue
            key = (request_id, int(rows.positions[i]))
            seen.replaced += key in seen.rows
            seen.rows[key] = masked[i]
            seen.sampled[key] = int(sampled[i])

    TopKTopPSampler.forward_cpu = forward_cpu
    CaptureCore.on_step = on_step  # type: ignore[method-assign]
    CaptureCore.on_draw = on_draw  # type: ignore[method-assign]
    V2Adapter._draw = draw  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        TopKTopPSampler.forward_cpu = stock_forward
        CaptureCore.on_step = stock_on_step  # type: ignore[method-assign]
        CaptureCore.on_draw = stock_on_draw  # type: ignore[method-assign]
        V2Adapter._draw = stock_draw  # type: ignore[method-assign]


def memory_rows(url: str) -> list[dict[str, Any]]:
    """Read the committed rows of any fsspec output."""
    storage = Storage.open(url, {})
    rows: list[dict[str, Any]] = []
    for name in sorted(storage.list("_commit")):
        file = json.loads(gzip.decompress(storage.read_bytes(f"_commit/{name}")))["file"]
        rows += pq.read_table(pa.BufferReader(storage.read_bytes(file))).to_pylist()
    return rows
