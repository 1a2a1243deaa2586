"""One sampling step of vLLM's samplers and of the capture, for `samplers.py`: what is timed."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases import ROWS, SEED, SETS, SPREADS, VOCAB, make_cut
from vllm.v1.sample.ops.topk_topp_sampler import (
    apply_top_k_top_p,
    flashinfer_sample,
    flashinfer_sampler_supported,
)
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.version import __version__ as vllm_version

from rollout.kernels.step_output import RowKind, StepOutput
from rollout.kernels.support_capture import capture_step
from rollout.kernels.support_cut import SupportCut
from rollout.kernels.token_draw import TokenDraw

STOCK = "vLLM"
FLASHINFER = "vLLM, FlashInfer"
BESIDE = "vLLM, capture of its masked logits"
DRAWS = "vLLM masks, capture draws"
TRUNCATES = "capture truncates and draws"

# N rows, V vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the tokens are sampled."""

    name: str
    spread: float
    """Standard deviation of the logits."""
    top_k: int
    """0 for none."""
    top_p: float


SETTINGS = (
    Setting(name="top-p .95, mean 8", spread=SPREADS[8], top_k=0, top_p=0.95),
    Setting(name="top-p .95, mean 174", spread=SPREADS[174], top_k=0, top_p=0.95),
    Setting(name="top-p .95, mean 4,000", spread=SPREADS[4_000], top_k=0, top_p=0.95),
    Setting(name="top-k 128, top-p .95, mean 174", spread=SPREADS[174], top_k=128, top_p=0.95),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What the steps of a setting run on."""

    sets: list[torch.Tensor]
    """Of logits, each [N, V] float32."""
    copies: list[torch.Tensor]
    """Of the sets; vLLM masks them."""
    top_k: torch.Tensor | None
    """[N] int32, as vLLM has it."""
    top_p: torch.Tensor | None
    """[N] float32, as vLLM has it."""
    cut: SupportCut
    kinds: torch.Tensor
    """[N] int8."""
    seeds: torch.Tensor
    """[N] int64."""
    lead: torch.Tensor
    """[N] int64, see `TokenDraw`."""
    positions: torch.Tensor
    """[N] int64, output positions."""
    noise_positions: torch.Tensor
    """[N] int64, vLLM's positions: `lead` and `positions` together."""
    mapping: torch.Tensor
    """[N] int64, where vLLM has the seed and the temperature of each row."""
    temperature: torch.Tensor
    """[N] float32, not 0; the logits are divided by it already."""
    add_noise: Any
    """vLLM's own noise, see `TokenDraw`; null where this vLLM has none."""
    out: StepOutput

    @classmethod
    def make(
        cls,
        setting: Setting,
        add_noise: Any,
        device: torch.device,
        *,
        rows: int = ROWS,
        vocab_size: int = VOCAB,
    ) -> Step:
        """Make the logits and the buffers of a setting.

        Args:
            setting: how the tokens are sampled.
            add_noise: see the field.
            device: where to.
            rows: N.
            vocab_size: V.
        """
        sets = []
        for i in range(SETS):
            generator = torch.Generator(device=device).manual_seed(SEED + i)
            values = torch.randn(rows, vocab_size, generator=generator, device=device)
            sets.append(values.mul_(setting.spread))
        cut = make_cut(setting.top_k, setting.top_p, rows, device)
        numbers = torch.arange(rows, device=device)
        lead, positions = 100 + numbers * 7, numbers * 3
        return cls(
            sets=sets,
            copies=[logits.clone() for logits in sets],
            top_k=cut.top_k if setting.top_k else None,
            top_p=cut.top_p if setting.top_p < 1.0 else None,
            cut=cut,
            kinds=torch.full((rows,), int(RowKind.KEPT), dtype=torch.int8, device=device),
            seeds=numbers * 0x9E3779B97F4A7C1 + SEED,
            lead=lead,
            positions=positions,
            noise_positions=lead + positions,
            mapping=numbers,
            temperature=torch.ones(rows, device=device),
            add_noise=add_noise,
            out=StepOutput.allocate(
                max_rows=rows,
                vocab_size=vocab_size,
                capacity=1 << 24,
                top=0,
                draws=0,
                device=device,
            ),
        )

    def restore(self) -> None:
        """Copy the logits again, without what vLLM has masked."""
        for copy, logits in zip(self.copies, self.sets, strict=True):
            copy.copy_(logits)

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Truncate as vLLM does.

        Args:
            logits: [N, V] float32, may be masked in place.

        Returns:
            [N, V] float32.
        """
        masked: torch.Tensor = apply_top_k_top_p(logits, self.top_k, self.top_p)
        return masked

    def draw(self, masked: torch.Tensor) -> torch.Tensor:
        """Draw as vLLM does.

        Args:
            masked: [N, V] float32.

        Returns:
            [N] int64, the tokens.
        """
        # older versions draw for no drafts
        drafting = {"is_drafting": False} if "is_drafting" in _DRAW_PARAMETERS else {}
        tokens: torch.Tensor = gumbel_sample(
            masked,
            self.mapping,
            self.temperature,
            self.seeds,
            self.noise_positions,
            apply_temperature=False,
            **drafting,
        )
        return tokens

    def capture(self, logits: torch.Tensor, sampled: torch.Tensor, draw: TokenDraw | None) -> None:
        """Run the capture.

        Args:
            logits: [N, V] float32.
            sampled: [N] int64, the tokens, or where to write them.
            draw: how to draw them; null if they are drawn.
        """
        capture_step(
            logits,
            sampled,
            self.kinds,
            self.out,
            top=0,
            draws=0,
            seeds=self.seeds,
            positions=self.positions,
            draw=draw,
        )

    def token_draw(self, *, cut: bool) -> TokenDraw:
        """Return how the capture draws.

        Args:
            cut: whether it truncates too.
        """
        return TokenDraw(
            add_noise=self.add_noise,
            seeds=self.seeds,
            lead=self.lead,
            untruncated=False,
            cut=self.cut if cut else None,
        )


_DRAW_PARAMETERS = inspect.signature(gumbel_sample).parameters
Arm = Callable[[Step, torch.Tensor], torch.Tensor]
"""Samples of a step's fresh logits [N, V] and returns the tokens, [N] int64."""


def _stock(step: Step, logits: torch.Tensor) -> torch.Tensor:
    return step.draw(step.mask(logits))


def _flashinfer(step: Step, logits: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = flashinfer_sample(logits, step.top_k, step.top_p).to(torch.int64)
    return tokens


def _beside(step: Step, logits: torch.Tensor) -> torch.Tensor:
    masked = step.mask(logits)
    tokens = step.draw(masked)
    step.capture(masked, tokens, None)
    return tokens


def _draws(step: Step, logits: torch.Tensor) -> torch.Tensor:
    step.capture(step.mask(logits), step.out.sampled_ids, step.token_draw(cut=False))
    return step.out.sampled_ids


def truncates(step: Step, logits: torch.Tensor) -> torch.Tensor:
    """Let the capture truncate and draw.

    Args:
        step: what it runs on.
        logits: [N, V] float32, not masked.

    Returns:
        [N] int64, the tokens, where the next step overwrites them.
    """
    step.capture(logits, step.out.sampled_ids, step.token_draw(cut=True))
    return step.out.sampled_ids


ARMS: dict[str, Arm] = {
    STOCK: _stock,
    FLASHINFER: _flashinfer,
    BESIDE: _beside,
    DRAWS: _draws,
    TRUNCATES: truncates,
}


def usable_arms() -> tuple[Any, dict[str, str]]:
    """Find out what this installation can't run.

    Returns:
        add_noise: vLLM's noise, see `TokenDraw`; null where the version has none that is known.
        missing: why not, by the arms' names.
    """
    missing: dict[str, str] = {}
    if importlib.util.find_spec("flashinfer") is None:
        missing[FLASHINFER] = "FlashInfer is not installed"
    elif not flashinfer_sampler_supported():
        missing[FLASHINFER] = "FlashInfer is installed, but vLLM does not sample by it here"
    try:
        from rollout.capture.v2_noise import add_noise
    except ImportError as error:
        reason = f"vLLM {vllm_version} has no noise that is known: {error}"
        return None, missing | {DRAWS: reason, TRUNCATES: reason}
    return add_noise, missing
