"""From rows to the ids that the engine sees."""

import logging
from pathlib import Path
from typing import Any

import pytest
from checkpoints import BOS, EOS, VOCAB, make_checkpoint, make_tokenizer

from rollout.config import ModelConfig, PromptsConfig, SamplingConfig
from rollout.errors import InputError
from rollout.model_files import ModelFiles, resolve_model
from rollout.prompts import Prompt
from rollout.render import Renderer
from rollout.rows import Rejection

SAMPLING = SamplingConfig(max_tokens=8, top_p=0.9)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return resolve_model(ModelConfig(path=str(folder)))


def renderer(files: ModelFiles, **config: Any) -> Renderer:
    return Renderer(files, PromptsConfig(path="p.jsonl", **config), trust_remote_code=False)


def row(**fields: Any) -> Prompt:
    values: dict[str, Any] = {
        "key": "k" * 64,
        "prompt_id": "id",
        "line": 7,
        "prompt": None,
        "messages": None,
        "prompt_token_ids": None,
        "sampling": SAMPLING,
        "chat_template_kwargs": {},
        "row": {},
        "metadata": None,
    }
    return Prompt(**(values | fields))


def ids_of(text: str) -> list[int]:
    """Look ASCII characters up one by one, without any of the tokenizer's rules."""
    tokenizer = make_tokenizer(adds_bos=False)
    found: list[int] = tokenizer.convert_tokens_to_ids(list(text))
    return found


def rejected(result: list[int] | Rejection) -> Rejection:
    assert isinstance(result, Rejection)
    assert (result.stage, result.line, result.file) == ("render", 7, "p.jsonl")
    assert (result.prompt_key, result.prompt_id) == ("k" * 64, "id")
    return result


def test_u13_one_begin_token_however_a_prompt_is_written(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    render = renderer(files).render
    expected = [BOS, *ids_of("<user>hi.")]
    assert render(row(messages=CHAT), None) == expected
    assert render(row(prompt="<bos><user>hi."), None) == expected
    assert render(row(prompt="<user>hi."), None) == expected
    assert render(row(prompt_token_ids=expected), None) == expected
    assert not caplog.records


def test_u13_a_prompt_that_ends_up_with_two_is_reported_once(
    files: ModelFiles, caplog: pytest.LogCaptureFixture
) -> None:
    one = renderer(files)
    with caplog.at_level(logging.WARNING):
        assert one.render(row(prompt="<bos><bos>x"), None) == [BOS, BOS, *ids_of("x")]
        assert one.render(row(prompt_token_ids=[BOS, BOS]), None) == [BOS, BOS]
    assert [record.getMessage() for record in caplog.records] == [
        "prompts p.jsonl line 7: the prompt starts with two begin-of-sequence tokens (id 256)"
    ]


def test_template_arguments_reach_the_template(files: ModelFiles) -> None:
    render = renderer(files).render
    loud = render(row(messages=CHAT, chat_template_kwargs={"loud": True}), None)
    assert loud == [BOS, *ids_of("<user>hi!")]
    bare = render(row(messages=CHAT, chat_template_kwargs={"add_generation_prompt": False}), None)
    assert bare == [BOS, *ids_of("<user>hi")]


def test_a_template_that_raises(files: ModelFiles) -> None:
    message = {"role": "boom", "content": "x"}
    rejection = rejected(renderer(files).render(row(messages=[message]), None))
    assert rejection.reason == "render_failed"
    assert rejection.detail == "TemplateError: no such role: boom"
    assert rejection.num_prompt_tokens is None


def test_no_template(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink()
    one = renderer(resolve_model(ModelConfig(path=str(folder))))
    assert rejected(one.render(row(messages=CHAT), None)).reason == "render_failed"
    assert one.render(row(prompt="x"), None) == [BOS, *ids_of("x")]


@pytest.mark.parametrize("policy", ["reject", "fail", "truncate_left"])
@pytest.mark.parametrize(
    ("length", "fits"), [(1, True), (62, True), (63, True), (64, False), (65, False), (5000, False)]
)
def test_lengths(files: ModelFiles, policy: str, length: int, fits: bool) -> None:
    one = renderer(files, long_prompts=policy)
    ids = [i % 250 for i in range(length)]
    if fits:
        assert one.render(row(prompt_token_ids=ids), 64) == ids
        assert one.truncated == 0
        return
    if policy == "fail":
        with pytest.raises(InputError, match=rf"p.jsonl line 7: got {length} tokens, expected at "):
            one.render(row(prompt_token_ids=ids), 64)
        return
    result = one.render(row(prompt_token_ids=ids), 64)
    if policy == "reject":
        rejection = rejected(result)
        assert rejection.reason == "prompt_too_long"
        assert rejection.detail == f"got {length} tokens, expected at most 63 (max_model_len 64)"
        assert rejection.num_prompt_tokens == length
    else:
        assert result == ids[-56:]  # max_tokens is 8
        assert one.truncated == 1


def test_a_cut_leaves_half_to_the_prompt(files: ModelFiles) -> None:
    one = renderer(files, long_prompts="truncate_left")
    ids = list(range(100))
    greedy = SAMPLING.model_copy(update={"max_tokens": 1_000_000})
    assert one.render(row(prompt_token_ids=ids, sampling=greedy), 64) == ids[-32:]
    assert one.render(row(prompt_token_ids=ids, sampling=greedy), 3) == ids[-2:]
    assert one.render(row(prompt_token_ids=ids, sampling=greedy), 2) == ids[-1:]
    assert rejected(one.render(row(prompt_token_ids=ids), 1)).reason == "prompt_too_long"


def test_empty_prompts(files: ModelFiles, tmp_path: Path) -> None:
    rejection = rejected(renderer(files).render(row(prompt_token_ids=[]), 64))
    assert (rejection.reason, rejection.num_prompt_tokens) == ("empty_prompt", 0)
    assert renderer(files).render(row(prompt=""), 64) == [BOS]
    folder = make_checkpoint(tmp_path, tokenizer=False)
    make_tokenizer(adds_bos=False).save_pretrained(folder)
    without = renderer(resolve_model(ModelConfig(path=str(folder))))
    assert rejected(without.render(row(prompt=""), 64)).reason == "empty_prompt"


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**70])
def test_ids_outside_of_the_vocabulary(files: ModelFiles, bad: int) -> None:
    one = renderer(files)
    rejection = rejected(one.render(row(prompt_token_ids=[0, bad, VOCAB - 1]), 64))
    assert rejection.reason == "bad_token_id"
    assert rejection.detail == (
        f"prompt: token id {bad} is outside of the model's vocabulary of {VOCAB}"
    )
    assert one.render(row(prompt_token_ids=[0, VOCAB - 1]), 64) == [0, VOCAB - 1]


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_sampling_ids_outside_of_the_vocabulary(files: ModelFiles, name: str) -> None:
    inside = SAMPLING.model_copy(update={name: (VOCAB - 1,)})
    outside = SAMPLING.model_copy(update={name: (1, VOCAB)})
    assert renderer(files).render(row(prompt="x", sampling=inside), 64) == [BOS, *ids_of("x")]
    rejection = rejected(renderer(files).render(row(prompt="x", sampling=outside), 64))
    assert rejection.detail.startswith(f"sampling.{name}: token id {VOCAB} is outside")


def test_a_checkpoint_without_tokenizer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bare", tokenizer=False)
    one = renderer(resolve_model(ModelConfig(path=str(folder))))
    assert not one.has_tokenizer
    assert one.render(row(prompt_token_ids=[1, 2]), 64) == [1, 2]
    for text in (row(prompt="x"), row(messages=CHAT)):
        rejection = rejected(one.render(text, 64))
        assert rejection.reason == "render_failed"
        assert rejection.detail.endswith("has no tokenizer, expected prompt_token_ids")
    assert one.decode([1, 2]) is None
    assert one.show([1, 2]) is None


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{")
    files = resolve_model(ModelConfig(path=str(folder)))
    with pytest.raises(InputError, match="tokenizer can't be loaded: ") as caught:
        renderer(files)
    assert "\n" not in str(caught.value)


def test_decoding_loses_what_text_cannot_hold(files: ModelFiles) -> None:
    one = renderer(files)
    tokenizer = make_tokenizer(adds_bos=False)
    smile = tokenizer.encode("a\U0001f600")
    assert len(smile) == 5
    assert one.decode(smile) == "a\U0001f600"
    assert one.decode(smile[:3]) == "a\ufffd"
    assert one.decode([*ids_of("a"), EOS]) == "a"
    assert one.show([BOS, *ids_of("a"), EOS]) == "<bos>a<eos>"
    # ids of a vocabulary that is padded beyond the tokenizer
    assert one.decode([*ids_of("a"), VOCAB - 1, *ids_of("b")]) == "ab"
    assert one.decode([VOCAB - 1]) == ""
    assert one.decode([]) == ""


class _PickyTokenizer:
    """A tokenizer in Python that fails on ids without an entry."""

    bos_token_id = None

    def __len__(self) -> int:
        return 3

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(["x", "y", "z"][i] for i in ids)


def test_decoding_never_fails(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    one = renderer(files)
    monkeypatch.setattr(one, "_tokenizer", _PickyTokenizer())
    assert one.decode([2, 5, 0]) == "zx\ufffd"


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": None},
        {"vocab_size": True},
        {"vocab_size": "9"},
        {"vocab_size": None, "text_config": None},
        {"vocab_size": None, "text_config": [1]},
    ],
)
def test_no_vocabulary_size(tmp_path: Path, config: dict[str, Any]) -> None:
    files = resolve_model(ModelConfig(path=str(make_checkpoint(tmp_path, **config))))
    with pytest.raises(InputError, match=r"config\.json has no vocab_size"):
        renderer(files)


def test_nested_vocabulary_size(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path, tokenizer=False, vocab_size=None, text_config={"vocab_size": 9}
    )
    one = renderer(resolve_model(ModelConfig(path=str(folder))))
    assert one.render(row(prompt_token_ids=[8]), None) == [8]
    assert rejected(one.render(row(prompt_token_ids=[9]), None)).reason == "bad_token_id"
