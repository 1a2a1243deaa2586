"""What a person may write in a job file, and what they are told."""

import re
from pathlib import Path

import pytest

from rollout.errors import ConfigError
from rollout.jobfile import check_job, load_job

BASE = """\
model: {path: out/model}
prompts: {path: p.jsonl}
sampling: {max_tokens: 5}
output: {path: out/data}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(BASE)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E-3", 1e-3),
        ("1.5e-3", 1.5e-3),
        (".5", 0.5),
        ("1", 1.0),
        ('"0.9"', 0.9),
        ("'1e-6'", 1e-6),
        ("0.000_1", 1e-4),
    ],
)
def test_numbers_are_numbers(job: Path, text: str, value: float) -> None:
    assert load_job(job, [f"sampling.min_p={text}"]).sampling.min_p == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("8.0", 8), ('"8"', 8), ("1_000", 1000), ("0x10", 16), ("0o10", 8), ("+8", 8)],
)
def test_whole_numbers_are_integers(job: Path, text: str, value: int) -> None:
    sampling = load_job(job, [f"sampling.n={text}"]).sampling
    assert sampling.n == value
    assert type(sampling.n) is int


@pytest.mark.parametrize("text", ["2024-01-01", "1:30", "010", "0b1", "=", "1e", "v1.0", "1.0.1"])
def test_text_that_yaml_1_1_reads_as_something_else_stays_text(job: Path, text: str) -> None:
    assert load_job(job, [f"model.revision={text}"]).model.revision == text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.stop=no", "sampling.stop.0: got False, expected text; put it in quotes: YAML"),
        ("sampling.stop=[x, off]", "sampling.stop.1: got False, expected text; put it in quotes:"),
        ("sampling.stop=[1]", "sampling.stop.0: got 1, expected text; put it in quotes"),
        ("sampling.stop=['']", "sampling.stop.0: got '', expected text that is not empty"),
        ("sampling.allowed_token_ids=[]", "allowed_token_ids: got [], expected one entry or more"),
        ("sampling.stop=", "sampling.stop: got None, expected a list"),
        ("sampling.n=yes", "sampling.n: got True, expected a number"),
        ("sampling.temperature=true", "sampling.temperature: got True, expected a number"),
        ("sampling.n=8.5", "sampling.n: got 8.5, expected a valid integer"),
        ("sampling.top_p=.nan", "sampling.top_p: got nan, expected a finite number"),
        ("sampling.temperature=.inf", "sampling.temperature: got inf, expected a finite number"),
        ("output.flush_seconds=.inf", "output.flush_seconds: got inf, expected a finite number"),
        ("engine.x=.nan", "engine: expected values that JSON can hold"),
        ("model.revision=1234567", "model.revision: got 1234567, expected text; put it in quotes"),
        ("model.dtype=fp32", "model.dtype: got 'fp32', expected 'auto', 'float32', 'bfloat16' or"),
        ("model.path=", "model.path: got None, expected a valid string"),
        ('output.path=""', "output.path: got '', expected text that is not empty"),
        ("model=out/model", "model: got 'out/model', expected a mapping with path, revision, "),
        ("sampling=1", "sampling: got 1, expected a mapping with max_tokens, n, temperature"),
        ("engine=[1]", "engine: got [1], expected a mapping"),
        ("engine.trust_remote_code='no'", "engine: trust_remote_code is 'no', expected true or "),
        ("model.path=${HOME}/m", "model.path: got ${HOME}: environment variables are not expanded"),
        ("prompts.storage_options={a: [{b: '${K}'}]}", "prompts.storage_options: got ${K}: envir"),
        ("prompts.chat_template_kwargs.tokenize=false", "chat_template_kwargs: `tokenize` is deci"),
    ],
)
def test_wrong_values_are_named(job: Path, override: str, message: str) -> None:
    assert message in refusal(job, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temperture=0.7", "sampling.temperture: unknown key; did you mean `temperature`"),
        ("modell.path=x", "modell: unknown key; did you mean `model`?"),
        ("model.pat=x", "model.pat: unknown key; did you mean `path`?"),
        ("prompts.long_prompt=x", "prompts.long_prompt: unknown key; did you mean `long_prompts`?"),
        ("capture.draw=1", "capture.draw: unknown key; did you mean `draws`?"),
        ("output.shard_byte=1", "output.shard_byte: unknown key; did you mean `shard_bytes`?"),
        ("temperature=0.7", "temperature: unknown key; did you mean `sampling.temperature`?"),
        ("capture.top_p=1", "capture.top_p: unknown key; did you mean `sampling.top_p`?"),
        ("sampling.model=x", "sampling.model: unknown key; did you mean `model`?"),
        ("sampling.draws=1", "sampling.draws: unknown key; did you mean `capture.draws`?"),
        ("path=x", "unknown key; did you mean `model.path` or `prompts.path` or `output.path`?"),
        ("zzz=x", "zzz: unknown key; known here: capture, engine, failures, model, output"),
    ],
)
def test_unknown_and_misplaced_keys_are_named(job: Path, override: str, message: str) -> None:
    assert message in refusal(job, override)


def test_every_mistake_is_named_at_once(job: Path) -> None:
    message = refusal(job, "sampling.temperture=0.7", "capture.top=-1", "model.path=5")
    assert message.split("; ") == [
        "model.path: got 5, expected text",
        "put it in quotes",
        "sampling.temperture: unknown key",
        "did you mean `temperature`?",
        "capture.top: got -1, expected greater than or equal to 0",
    ]


def test_missing_sections_are_named(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("sampling: {}\n")
    assert refusal(path) == (
        "model: missing; prompts: missing; sampling.max_tokens: missing; output: missing"
    )


def test_repeated_keys_are_refused_with_their_place(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE + "sampling: {n: 2}\n")
    assert refusal(path) == (
        f"job file {path} line 5, column 1: key `sampling` stands twice in one mapping"
    )
    path.write_text(BASE + "engine: {a: {b: 1, b: 2}}\n")
    assert "line 5, column 20: key `b` stands twice" in refusal(path)


def test_merge_keys_and_aliases_work(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: {path: m}\n"
        "prompts: {path: p.jsonl, storage_options: &o {key: a}}\n"
        "output: {path: d, storage_options: *o}\n"
        "sampling: &s {max_tokens: 5}\n"
        "engine: {<<: *s, seed_like: 1}\n"
    )
    job = load_job(path, ["output.storage_options.key=b"])
    assert job.engine == {"max_tokens": 5, "seed_like": 1}
    assert job.output.storage_options == {"key": "b"}
    assert job.prompts.storage_options == {"key": "a"}  # an alias is no shared variable


def test_overrides(job: Path) -> None:
    config = load_job(
        job,
        [
            "sampling.top_p=0.9",
            "capture.draws=4",
            "engine.compilation_config.level=3",
            "sampling.stop=[a, 'no']",
            " sampling . bad_words = x",
            "prompts.storage_options={key: v=w}",
            "reward=jobs/task.py:reward",
            "output.path=s3://bucket/run",
            "sampling.top_p=0.8",
        ],
    )
    assert config.sampling.top_p == 0.8
    assert config.capture.draws == 4
    assert config.engine == {"compilation_config": {"level": 3}}
    assert config.sampling.stop == ("a", "no")
    assert config.sampling.bad_words == ("x",)
    assert config.prompts.storage_options == {"key": "v=w"}
    assert config.reward == "jobs/task.py:reward"
    assert config.output.path == "s3://bucket/run"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.top_p", "override 'sampling.top_p': expected dotted.key=value, such as "),
        ("=1", "override '=1': expected dotted.key=value"),
        ("sampling..n=1", "override 'sampling..n=1': expected dotted.key=value"),
        ("reward.x.y=1", "reward: got {'x': {'y': 1}}, expected a valid string"),
        ("sampling.max_tokens.x=1", "override of sampling.max_tokens.x: `max_tokens` is not a sec"),
        ("sampling.stop={", "override of sampling.stop line 1, column 2: while parsing a flow"),
    ],
)
def test_bad_overrides_are_refused(job: Path, override: str, message: str) -> None:
    assert refusal(job, override).startswith(message)


@pytest.mark.parametrize(
    "override",
    ["prompts.storage_options=hunter2", "output.storage_options={key: hunter2, [}"],
)
def test_storage_options_never_reach_a_message(job: Path, override: str) -> None:
    assert "hunter2" not in refusal(job, override)


def test_secrets_do_not_reach_a_syntax_error(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("output: {storage_options: {secret: hunter2, [}}\n")
    message = refusal(path)
    assert "line 1" in message
    assert "hunter2" not in message


def test_placeholders_may_stand_in_free_text(job: Path) -> None:
    config = load_job(job, ["sampling.stop=['${x}']", "prompts.chat_template_kwargs.t=${x}"])
    assert config.sampling.stop == ("${x}",)
    assert config.prompts.chat_template_kwargs == {"t": "${x}"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, expected `model`, `prompts`"),
        (b"# nothing\n", "is empty"),
        (b"- 1\n", "holds a list, expected a mapping"),
        (b"just words\n", "holds a str, expected a mapping"),
        (b"\x80\x81\xff", "expected YAML in UTF-8"),
        (b"a: \x00\n", "unacceptable character"),
        (b"a: [1\n", "line 2, column 1: while parsing a flow sequence"),
        (b"\ta: 1\n", "line 1, column 1: while scanning for the next token"),
        (b"a: 1\n---\nb: 2\n", "line 2, column 1: expected a single document"),
        (b"a: !!python/object/apply:os.system [true]\n", "could not determine a constructor"),
        (b"a: !!int x\n", "invalid literal for int()"),
        (b"? [1, 2]\n: 3\n", "a key is a list or a mapping, expected text"),
        (b"[" * 5000, "nested too deeply"),
    ],
    ids=lambda value: repr(value[:12]) if isinstance(value, bytes) else "",
)
def test_files_that_are_no_job(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    found = refusal(path)
    assert found.startswith(f"job file {path}")
    assert message in found


def test_a_mapping_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE + "engine: &e {a: *e}\n")
    assert "nested too deeply" in refusal(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.yaml") == (
        f"job file {tmp_path / 'no.yaml'}: No such file or directory"
    )
    assert refusal(tmp_path) == f"job file {tmp_path}: Is a directory"


def test_byte_order_mark_and_crlf(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_job(path).model.path == "out/model"


def test_keys_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(BASE + "on: 1\n")
    assert re.search("got True, expected a name in text as key; put it in quotes", refusal(path))


def test_a_long_wrong_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        check_job({"model": "x" * 10_000})
    assert len(str(caught.value)) < 400
