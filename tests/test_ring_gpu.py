"""The ring on a device: what arrives in the spool is what the logits of each step say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from noise import add_noise, noise_of
from spool_blocks import entries_of

from rollout.capture.batch import BatchRows, RowCut, RowNoise
from rollout.capture.request import GREEDY, KEPT, NONE, SKIP, CaptureSettings
from rollout.capture.ring import RingRecorder
from rollout.kernels.support_cut import SupportCut, cut_reference
from rollout.kernels.token_draw import tokens_reference
from rollout.spool import SpoolReader, StoredStep

pytestmark = pytest.mark.gpu

ROWS, STEPS = 96, 200
VOCABS = (20_011, 20_008)  # without and with wide loads
MASS_TOLERANCE = 2e-6  # of a p: sums on the device are float32


def make_recorder(vocab: int = VOCABS[0], draws: int = 2) -> RingRecorder:
    settings = CaptureSettings(support_capacity=1 << 21, top=0, draws=draws)
    return RingRecorder(
        settings,
        device=torch.device("cuda"),
        max_rows=ROWS,
        vocab_size=vocab,
        slots=3,
        add_noise=add_noise,
    )


@pytest.fixture(scope="module")
def recorder(request: pytest.FixtureRequest) -> Iterator[RingRecorder]:
    made = make_recorder(*request.param)
    made.warm_up((torch.float32, torch.bfloat16))
    yield made
    made.stop()


def cut_of(step: int, rows: int, vocab: int) -> RowCut | None:
    """Another cut of each row; each fifth step comes masked."""
    if step % 5 == 4:
        return None
    number = (np.arange(rows) + step) % 6
    return RowCut(
        top_k=np.array([vocab, 1, 40, vocab, 3000, vocab], np.int32)[number],
        top_p=np.array([0.9, 1.0, 0.7, 0.05, 0.999, 1.0], np.float32)[number],
    )


def logits_of(
    step: int, vocab: int, dtype: torch.dtype, buffer: torch.Tensor | None, *, cut: bool
) -> torch.Tensor:
    """Another number of rows and ids kept at each step; in a fixed buffer where there is one.

    Of rows that are cut, every other one had ids masked before.
    """
    generator = torch.Generator("cuda").manual_seed(step)
    n = ROWS - step % 4
    logits = torch.randn(n, vocab, device="cuda", generator=generator)
    share = 0.9 if step % 7 == 0 else 0.002
    dropped = torch.rand(n, vocab, device="cuda", generator=generator) > share
    if cut and cut_of(step, n, vocab) is not None:
        dropped[::2] = False
    logits[dropped] = -torch.inf
    logits[:, step] = 1.0
    if buffer is None:
        return logits.to(dtype)
    buffer[:n].copy_(logits)
    return buffer[:n]


def tokens_of(step: int, logits: torch.Tensor) -> list[int]:
    """The tokens that a step draws; its last row does not count, a first one may be greedy."""
    n, vocab = logits.shape
    noise = noise_of(list(range(n)), list(range(step, step + n)), vocab)
    if step % 2 == 0:
        noise[0] = 0.0
    return [*tokens_reference(logits, noise)[:-1].tolist(), 0]


def mask_of(mask: torch.Tensor, rows: int) -> torch.Tensor:
    """Keep what is in rows that have no mask."""
    return torch.cat([mask, mask.new_ones(rows - mask.shape[0], mask.shape[1])])


def masked_by(logits: torch.Tensor, cut: RowCut, more: float) -> torch.Tensor:
    """Mask what a cut drops that keeps some more of the mass."""
    top_k, top_p = torch.from_numpy(cut.top_k).cuda(), torch.from_numpy(cut.top_p).cuda()
    top_p = torch.where(top_p < 1.0, top_p + more, top_p)
    return cut_reference(logits, SupportCut(top_k=top_k, top_p=top_p))


def check_cut(logits: torch.Tensor, stored: torch.Tensor, cut: RowCut) -> None:
    """Check that rows store the ids that a cut keeps, but for the mass that sums can't tell."""
    least = masked_by(logits, cut, -MASS_TOLERANCE) > -torch.inf
    most = masked_by(logits, cut, MASS_TOLERANCE) > -torch.inf
    assert not (least & ~stored).any()
    assert not (stored & ~most).any()
    lowest = logits.float().masked_fill(~stored, torch.inf).min(dim=1).values
    assert (lowest >= logits.float().masked_fill(stored, -torch.inf).max(dim=1).values).all()


def check(found: StoredStep, logits: torch.Tensor, *, drawn: bool, cut: RowCut | None) -> None:
    """Compare one stored step with float64."""
    step, (n, vocab) = found.step, logits.shape
    live = n - 1  # the last row does not count
    assert found.request_ids == [f"r{step}-{i}" for i in range(n)]
    assert found.positions.tolist() == [step + i for i in range(n)]
    entries = torch.from_numpy(entries_of(found).view(np.int64)).cuda()
    row = torch.repeat_interleave(
        torch.arange(live, device="cuda"), torch.from_numpy(found.counts[:live].copy()).cuda()
    )
    keys = row * vocab + (entries & 0xFFFFFFFF)
    mask = logits[:live] > -torch.inf
    if cut is not None:
        stored = torch.zeros(n, vocab, dtype=torch.bool, device="cuda")
        stored.view(-1)[keys] = True
        kept = torch.from_numpy(found.kinds == KEPT).cuda()
        of_kept = kept.cpu().numpy()
        check_cut(
            logits[kept],
            stored[kept],
            RowCut(top_k=cut.top_k[of_kept], top_p=cut.top_p[of_kept]),
        )
        mask[kept[:live]] = stored[kept]
        logits = logits.masked_fill(~mask_of(mask, n), -torch.inf)
    assert found.sampled.tolist() == (tokens_of(step, logits) if drawn else [step] * n)
    if drawn and step % 2 == 0:
        mask[0] = torch.arange(vocab, device="cuda") == found.sampled[0]
        logits = logits.masked_fill(~mask_of(mask, n), -torch.inf)
        mask[1] = False
    assert found.counts.tolist() == [*mask.sum(dim=1).tolist(), 0]
    assert found.need == found.num_entries == int(mask.sum())
    assert torch.equal(keys.sort().values, mask.flatten().nonzero().flatten())
    exact = torch.log_softmax(logits[:live].double(), dim=-1).flatten()[keys]
    error = ((entries >> 32).to(torch.int32).view(torch.float32).double() - exact).abs()
    assert torch.all(error <= 5e-7 + 2.0**-23 * exact.abs())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", ["fixed", "anywhere"])
@pytest.mark.parametrize(
    ("recorder", "way"),
    # draws are recorded of masked logits alone
    [((v, 0 if way == "cut" else 2), way) for v in VOCABS for way in ("sampled", "drawn", "cut")],
    indirect=["recorder"],
    ids=[f"{v}-{way}" for v in VOCABS for way in ("sampled", "drawn", "cut")],
)
def test_every_step_arrives(
    recorder: RingRecorder, tmp_path: Path, dtype: torch.dtype, place: str, way: str
) -> None:
    vocab = recorder._vocab_size
    drawn, cut = way != "sampled", way == "cut"
    buffer = torch.empty(ROWS, vocab, device="cuda", dtype=dtype) if place == "fixed" else None
    launches = {key for key in recorder._graphs._graphs if len(key) > 2}  # type: ignore[arg-type]
    recorder.start(str(tmp_path))
    seeds = np.arange(ROWS, dtype=np.int64)
    returned = []
    for step in range(STEPS):
        logits = logits_of(step, vocab, dtype, buffer, cut=cut)
        n = logits.shape[0]
        kinds = np.full(n, KEPT, np.int8)
        kinds[-1] = SKIP
        if drawn and step % 2 == 0:
            kinds[:2] = GREEDY, NONE
        rows = BatchRows(
            request_ids=[f"r{step}-{i}" for i in range(n)],
            positions=np.arange(step, step + n, dtype=np.int32),
            kinds=kinds,
            seeds=seeds[:n],
            noise=RowNoise(
                seeds=seeds[:n],
                lead=seeds[:n] * 0,
                untruncated=step % 2 == 0,
                cut=cut_of(step, n, vocab) if cut else None,
            )
            if drawn
            else None,
        )
        sampled = None if drawn else torch.full((n, 1), step, device="cuda", dtype=torch.int32)
        torch.cuda.set_sync_debug_mode("error")
        returned.append(recorder.record(step, logits, sampled, rows))
        torch.cuda.set_sync_debug_mode("default")
        logits.fill_(torch.nan)  # the engine goes on with the memory
        del logits
    recorder.flush()
    assert recorder.error is None
    steps = 0
    for found in SpoolReader(tmp_path).poll():
        n = len(found.kinds)
        check(
            found,
            logits_of(found.step, vocab, dtype, None, cut=cut),
            drawn=drawn,
            cut=cut_of(found.step, n, vocab) if cut else None,
        )
        assert found.draws.shape == (n, 0 if cut else 2)
        tokens = returned[found.step]
        assert (None if tokens is None else tokens.tolist()) == (
            found.sampled.tolist() if drawn else None
        )
        steps += 1
    assert steps == STEPS
    # no step was launched kernel by kernel, wherever its logits were
    graphs = recorder._graphs._graphs
    assert {key for key in graphs if len(key) > 2} == launches  # type: ignore[arg-type]
    assert all(graphs[key] is not None for key in launches)
    assert len(graphs) <= recorder._graphs.most


def test_memory_of_a_ring_that_is_gone_is_memory_again() -> None:
    """Addresses that stay pinned after their memory is gone would be read in its place."""
    for _ in range(4):
        made = make_recorder()
        size = made._ring.memory.nbytes
        del made
        host = torch.arange(size // 8)
        assert torch.equal(host.cuda().cpu(), host)
