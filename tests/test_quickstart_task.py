"""The quickstart's reward, its split of the words, its prompts file and its model maker."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from quickstart_scripts import QUICKSTART, load_script

from rollout.jobfile import load_job

task = load_script("task")


def longest_common_block(a: str, b: str) -> tuple[int, int, int]:
    """Brute force: the longest common substring, earliest in `a`, then earliest in `b`."""
    return max(
        (
            (i, j, size)
            for i in range(len(a))
            for j in range(len(b))
            for size in range(min(len(a) - i, len(b) - j) + 1)
            if a[i : i + size] == b[j : j + size]
        ),
        key=lambda block: (block[2], -block[0], -block[1]),
        default=(0, 0, 0),
    )


def matching_letters(a: str, b: str) -> int:
    i, j, size = longest_common_block(a, b)
    if size == 0:
        return 0
    return size + matching_letters(a[:i], b[:j]) + matching_letters(a[i + size :], b[j + size :])


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        pytest.param("fedcba", "fedcba", 1.0, id="exact"),
        pytest.param("", "fedcba", 0.0, id="empty"),
        pytest.param("FEDCBA", "fedcba", 0.0, id="capitals"),
        pytest.param("fdb", "fedcba", 2 * 3 / 9, id="half-of-the-letters"),
        pytest.param("abcdef", "fedcba", 2 * 1 / 12, id="copy"),
        pytest.param("fedcbaxx", "fedcba", 2 * 6 / 14, id="too-long"),
    ],
)
def test_reward_of_known_completions(completion: str, answer: str, expected: float) -> None:
    reward = task.reverse_reward({"id": "p", "answer": answer}, completion, [])
    assert reward == pytest.approx(expected, abs=1e-12)


def test_reward_equals_the_brute_force_similarity() -> None:
    rng = random.Random(3)
    for _ in range(200):
        a = "".join(rng.choices("abc", k=rng.randint(0, 9)))
        b = "".join(rng.choices("abc", k=rng.randint(1, 9)))
        expected = 2 * matching_letters(a, b) / (len(a) + len(b))
        assert task.reverse_reward({"answer": b}, a, []) == pytest.approx(expected, abs=1e-12)


def test_reward_keeps_frequent_letters_of_long_answers() -> None:
    assert task.reverse_reward({"answer": "a" * 300}, "a" * 300 + "b", []) == pytest.approx(
        600 / 601
    )


@pytest.mark.parametrize(
    ("row", "got"), [({"id": "p"}, "NoneType"), ({"id": "p", "answer": 3}, "int")]
)
def test_reward_refuses_a_row_without_an_answer(row: dict[str, object], got: str) -> None:
    with pytest.raises(ValueError, match=f"prompt 'p': `answer` is {got}, expected text"):
        task.reverse_reward(row, "abc", [])


def test_words_split_one_in_eight_and_repeat_by_seed() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices(task.LETTERS, k=rng.randint(6, 16))) for _ in range(8000)]
    held_out = [w for w in words if sum(ord(c) - ord("a") for c in w) % 8 == 0]
    assert [w for w in words if task.is_held_out(w)] == held_out
    # 1000 expected, standard deviation 30; the seed is fixed
    assert 880 <= len(held_out) <= 1120
    for side in (False, True):
        drawn = [task.draw_word(random.Random(5), held_out=side) for _ in range(2)]
        assert drawn[0] == drawn[1]
        assert task.is_held_out(drawn[0]) is side


def test_prompts_file_is_what_the_script_writes_and_never_trained_on() -> None:
    lines = (QUICKSTART / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines == load_script("make_prompts").prompt_lines(64, 64)
    rows = [json.loads(line) for line in lines]
    words = [row["messages"][0]["content"] for row in rows]
    assert len(set(words)) == len({row["id"] for row in rows}) == 64
    assert all(task.is_held_out(word) for word in words)
    assert all("".join(reversed(row["answer"])) == w for row, w in zip(rows, words, strict=True))


def test_job_file_is_valid_and_names_what_exists() -> None:
    job = load_job(QUICKSTART / "job.yaml")
    root = QUICKSTART.parents[1]
    assert (root / job.prompts.path).is_file()
    assert job.reward == "jobs/quickstart/task.py:reverse_reward"
    assert job.sampling.support_kind(job.capture.top) == "kept"
    assert job.sampling.max_tokens == task.MAX_COMPLETION_TOKENS
    assert (job.sampling.n, job.sampling.top_p, job.sampling.temperature) == (8, 0.95, 1.0)


def is_subsequence(part: str, whole: str) -> bool:
    letters = iter(whole)
    return all(letter in letters for letter in part)


def test_behaviours_come_in_their_shares() -> None:
    maker = load_script("make_model")
    recipe = maker.Recipe(seed=0, steps=1)
    rng = random.Random(0)
    word = "abcdefghijkl"
    counts: Counter[str] = Counter()
    for _ in range(4000):
        answer = maker.answer_of(word, rng, recipe)
        if answer in (word.upper(), word):
            counts["capitals" if answer.isupper() else "copy"] += 1
        elif len(answer) == 6 and is_subsequence(answer, word[::-1]):
            counts["half"] += 1
        else:
            assert set(answer.lower()) <= set(task.LETTERS)
            counts["noisy"] += 1
    # five standard deviations of a share of 4000 draws: at most 0.039
    for name, share in (("capitals", 0.40), ("copy", 0.35), ("noisy", 0.15), ("half", 0.10)):
        assert counts[name] / 4000 == pytest.approx(share, abs=0.039), name


def test_training_batches_hold_no_held_out_word() -> None:
    maker = load_script("make_model")
    tokenizer = maker.make_tokenizer()
    batches = maker.training_batches(tokenizer, maker.Recipe(seed=0, steps=1))
    for _ in range(16):
        sequences, separators = next(batches)
        assert len(sequences) == 96
        for sequence, separator in zip(sequences, separators, strict=True):
            assert sequence[0] == tokenizer.bos_token_id
            assert sequence[separator] == tokenizer.sep_token_id
            assert sequence[-1] == tokenizer.eos_token_id
            word = tokenizer.decode(sequence[1:separator])
            assert 6 <= len(word) <= 16
            assert sum(ord(c) - ord("a") for c in word) % 8 != 0


@pytest.fixture
def tiny_model(tmp_path: Path) -> tuple[Path, ModuleType]:
    maker = load_script("make_model")
    output = tmp_path / "model"
    result = CliRunner().invoke(maker.main, ["--output", str(output), "--steps", "2"])
    assert result.exit_code == 0, result.output
    assert "step 2/2" in result.output
    assert "on 512 held-out prompts" in result.output
    return output, maker


def test_made_model_reloads_skips_and_is_replaced_only_when_its_own(
    tiny_model: tuple[Path, ModuleType],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, maker = tiny_model
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 1
    tokenizer = AutoTokenizer.from_pretrained(output)
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    # BOS, the word, SEP: ids follow from the order pad, eos, bos, sep, unk, a-z, A-Z
    expected = [2, *(5 + alphabet.index(c) for c in "quZx"), 3]
    chat = [{"role": "user", "content": "quZx"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert rendered == expected
    assert tokenizer.encode("quZx<sep>") == expected
    assert tokenizer.decode([*expected[1:-1], 1], skip_special_tokens=True) == "quZx"

    arguments = ["--output", str(output), "--steps", "2"]
    weights = (output / "model.safetensors").read_bytes()
    again = CliRunner().invoke(maker.main, arguments)
    assert again.exit_code == 0
    assert "up to date" in again.output
    assert "step" not in again.output
    # another recipe replaces the folder; the first recipe then gives the same weights again
    assert CliRunner().invoke(maker.main, [*arguments, "--seed", "1"]).exit_code == 0
    assert (output / "model.safetensors").read_bytes() != weights
    assert CliRunner().invoke(maker.main, arguments).exit_code == 0
    assert (output / "model.safetensors").read_bytes() == weights
    assert [p.name for p in output.parent.iterdir()] == ["model"]


def test_model_maker_refuses_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    maker = load_script("make_model")
    (tmp_path / "precious.txt").write_text("x")
    result = CliRunner().invoke(maker.main, ["--output", str(tmp_path), "--steps", "2"])
    assert result.exit_code == 1
    assert "exists and is not a quickstart model" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_another_size_is_made_by_the_same_steps(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    maker = load_script("make_model")
    output = tmp_path / "model"
    shape = {"hidden_size": 64, "intermediate_size": 96, "layers": 3, "heads": 2, "kv_heads": 1}
    arguments = ["--output", str(output), "--size", "large", "--device", "cpu"]
    for name, value in (shape | {"head_dim": 32, "batch_size": 8, "max_seconds": 1e-3}).items():
        arguments += ["--set", f"{name}={value}"]
    result = CliRunner().invoke(maker.main, arguments)
    assert result.exit_code == 0, result.output
    # the time is over after one step
    assert "step 1/1500" in result.output
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == torch.float32
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (3, 64)
    record = json.loads((output / maker.RECORD_NAME).read_text())
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert record["compute_dtype"] == "bfloat16"
    wrong = CliRunner().invoke(maker.main, [*arguments, "--set", "depth=3"])
    assert wrong.exit_code == 1
    assert "--set depth=3: expected one of seed, hidden_size" in wrong.output
