"""The quickstart's replay step against dense float64 logits, a mask and autograd."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from quickstart_scripts import load_script
from synthetic import make_record, make_row, plan
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.dataset import DatasetWriter
from rollout.rows import RolloutRow
from rollout.schema.entries import pack_entries
from rollout.storage import Storage

VOCAB, TEMPERATURE, TOP_P = 48, 0.8, 0.9
PROMPTS, SAMPLES = 5, 4

replay = load_script("replay_step")


def make_model(folder: Path) -> Any:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(0.0, 0.4)
        model.model.embed_tokens.weight.normal_(0.0, 0.5)
    model.save_pretrained(folder)
    return model.double().eval()


def masked_logprobs(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~kept, -torch.inf).log_softmax(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One rollout with what its sampler kept."""

    row: RolloutRow
    kept: torch.Tensor
    """[T, V] bool."""


def sample(model: Any, prompt: str, index: int, seed: int) -> Sampled:
    """Nucleus sampling written out: the smallest set of most probable ids that reaches top_p."""
    generator = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(VOCAB, (3 + seed % 4,), generator=generator).tolist()
    ids = list(prompt_ids)
    kept_rows, entries, chosen = [], [], []
    for _ in range(2 + seed % 7):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1] / TEMPERATURE
        order = logits.argsort(descending=True)
        before = logits.softmax(-1)[order].cumsum(-1) - logits.softmax(-1)[order]
        kept = torch.zeros(VOCAB, dtype=torch.bool)
        kept[order[before < TOP_P]] = True
        log_q = masked_logprobs(logits, kept)
        token = int(torch.multinomial(log_q.exp(), 1, generator=generator))
        support = kept.nonzero().squeeze(1)
        entries.append(pack_entries(support.numpy(), log_q[support].float().clamp(max=0).numpy()))
        chosen.append(float(log_q[token].float().clamp(max=0)))
        kept_rows.append(kept)
        ids.append(token)
    row = make_row(
        prompt,
        index,
        group_size=SAMPLES,
        prompt_token_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(ids[len(prompt_ids) :], np.int32),
        sampled_logprobs=np.array(chosen, np.float32),
        temperature=TEMPERATURE,
        support_offsets=np.cumsum([0, *(len(part) for part in entries)], dtype=np.int64),
        support_entries=np.concatenate(entries),
        reward=float(torch.rand((), generator=generator)),
    )
    return Sampled(row=row, kept=torch.stack(kept_rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """One line of the table, in float64."""

    loss: torch.Tensor
    ratio: float
    k3: float
    dense_ratio: float


def expected_line(model: Any, rollouts: list[Sampled], model_q: Any) -> Expected:
    """Icepop with centering from the formula, q from the weights that sampled."""
    means: dict[str, float] = {}
    for key in {item.row.prompt_key for item in rollouts}:
        group = [np.float32(i.row.reward) for i in rollouts if i.row.prompt_key == key]
        means[key] = float(np.mean(np.array(group, np.float64)))
    tokens = sum(item.row.token_ids.size for item in rollouts)
    loss = torch.zeros((), dtype=torch.float64)
    ratios, dense = [], []
    for item in rollouts:
        row = item.row
        ids = torch.tensor([*row.prompt_token_ids.tolist(), *row.token_ids.tolist()])
        first = row.prompt_token_ids.size - 1
        logits = model(ids[None]).logits[0, first:-1] / TEMPERATURE
        with torch.no_grad():
            log_q = masked_logprobs(model_q(ids[None]).logits[0, first:-1] / TEMPERATURE, item.kept)
        log_p = masked_logprobs(logits, item.kept)
        targets = ids[first + 1 :, None]
        ratio = (log_p - log_q).gather(1, targets).squeeze(1).exp()
        advantage = float(np.float32(row.reward)) - means[row.prompt_key]
        keep = (ratio.detach() >= 0.2) & (ratio.detach() <= 5.0)
        candidates = (log_p.detach() - log_q).exp()
        band = item.kept & (candidates >= 0.2) & (candidates <= 5.0)
        weight = torch.where(band, log_p.detach().exp(), 0.0)
        centering = (weight * torch.where(item.kept, log_p, 0.0)).sum(-1)
        loss = loss + advantage * (centering - torch.where(keep, ratio, 0.0)).sum() / tokens
        ratios.append(ratio.detach())
        full = logits.detach().log_softmax(-1).gather(1, targets).squeeze(1)
        dense.append((full - log_q.gather(1, targets).squeeze(1)).exp())
    r = torch.cat(ratios)
    return Expected(
        loss=loss,
        ratio=r.mean().item(),
        k3=(r - 1 - r.log()).mean().item(),
        dense_ratio=torch.cat(dense).mean().item(),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Sampled]]:
    root = tmp_path_factory.mktemp("replay")
    model = make_model(root / "model")
    rollouts = [
        sample(model, f"p{prompt}", index, seed=prompt * SAMPLES + index)
        for prompt in range(PROMPTS)
        for index in range(SAMPLES)
    ]
    writer = DatasetWriter.open(Storage.open(root / "data set"), make_record())
    writer.append_plan(plan("u000000", *(f"p{prompt}" for prompt in range(PROMPTS))))
    writer.commit_part("u000000", [item.row for item in rollouts])
    return root / "data set", root / "model", rollouts


def run_step(data: Path, model: Path, *arguments: str) -> tuple[list[str], dict[str, list[str]]]:
    result = CliRunner().invoke(
        replay.main,
        ["--path", str(data), "--model", str(model), "--learning-rate", "0.01", *arguments],
    )
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) < 100
    return lines, {line.split()[0]: line.split()[1:] for line in lines[2:]}


@pytest.mark.parametrize("budget", ["4096", "25"], ids=["one-micro-batch", "many-micro-batches"])
def test_the_table_equals_dense_float64(
    recorded: tuple[Path, Path, list[Sampled]], budget: str
) -> None:
    data, folder, rollouts = recorded
    lines, table = run_step(data, folder, "--token-budget", budget)
    assert lines[0].startswith("one icepop step with exact score centering: 20 rollouts")
    assert lines[0].endswith(" 1 micro-batch") == (budget == "4096")

    model_q = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    model = Qwen3ForCausalLM.from_pretrained(folder).double().eval()
    before = expected_line(model, rollouts, model_q)
    torch.autograd.backward(before.loss)
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    norm = torch.stack(squares).sum().sqrt().item()
    tokens = sum(item.row.token_ids.size for item in rollouts)

    loss, grad_norm, ratio, k3, kept, _, of, dense = table["before"]
    assert float(loss) == pytest.approx(before.loss.item(), abs=1.1e-4)
    assert float(grad_norm) == pytest.approx(norm, abs=1e-4, rel=1e-3)
    assert float(ratio) == pytest.approx(1.0, abs=1e-5)
    assert before.ratio == pytest.approx(1.0, abs=1e-12)
    assert abs(float(k3)) < 1e-9
    assert kept == of == str(tokens)
    # the mass that top_p kept, from dense logits
    assert float(dense) == pytest.approx(before.dense_ratio, abs=2e-5)
    assert 0.85 < before.dense_ratio < 0.98

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()
    with torch.no_grad():
        after = expected_line(model, rollouts, model_q)
    # AdamW's first step is the sign of the gradient, so float32 noise in tiny gradients shows
    loss, ratio, k3, _, _, _, dense = table["after"]
    assert float(loss) == pytest.approx(after.loss.item(), abs=2e-3)
    assert float(ratio) == pytest.approx(after.ratio, abs=5e-3)
    assert float(k3) == pytest.approx(after.k3, rel=0.05)
    assert float(dense) == pytest.approx(after.dense_ratio, abs=5e-3)
    assert after.k3 > 1e-3


def test_untruncated_rollouts_and_missing_inputs_get_one_sentence(
    tmp_path: Path, recorded: tuple[Path, Path, list[Sampled]]
) -> None:
    _, model, _ = recorded
    writer = DatasetWriter.open(Storage.open(tmp_path / "top"), make_record())
    writer.append_plan(plan("u000000", "p0"))
    rows = [make_row("p0", i, kind="top", vocab=VOCAB, reward=float(i)) for i in range(2)]
    writer.commit_part("u000000", [_small_ids(row) for row in rows])
    for arguments, message in (
        ((str(tmp_path / "top"), str(model)), "expected kept supports only"),
        ((str(tmp_path / "nothing"), str(model)), "is not a dataset"),
        ((str(tmp_path / "top"), str(tmp_path)), f"model {tmp_path}: no config.json in it"),
    ):
        result = CliRunner().invoke(replay.main, ["--path", arguments[0], "--model", arguments[1]])
        assert result.exit_code == 1
        assert result.output.startswith("Error: ")
        assert message in result.output


def _small_ids(row: RolloutRow) -> RolloutRow:
    row.prompt_token_ids %= VOCAB
    return row
