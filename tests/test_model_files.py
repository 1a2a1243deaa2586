"""A checkpoint is found, checked to be whole, and digested."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from safetensors.numpy import save_file

from rollout.config import ModelConfig
from rollout.errors import InputError
from rollout.model_files import ModelFiles, resolve_model

DIGESTS = ("weights_digest", "config_digest", "tokenizer_digest", "template_digest")


def resolve(path: Path | str, **config: Any) -> ModelFiles:
    return resolve_model(ModelConfig.model_validate({"path": str(path)} | config))


def refusal(path: Path | str, **config: Any) -> str:
    with pytest.raises(InputError) as caught:
        resolve(path, **config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def digests(folder: Path) -> dict[str, str]:
    files = resolve(folder)
    return {name: getattr(files, name) for name in DIGESTS}


def whole(folder: Path) -> Path:
    make_checkpoint(folder)
    (folder / "modeling_x.py").write_text("x = 1\n")
    (folder / "generation_config.json").write_text("{}")
    return folder


def test_digests_do_not_depend_on_the_place(tmp_path: Path) -> None:
    first = whole(tmp_path / "a")
    second = tmp_path / "deeper" / "b c"
    shutil.copytree(first, second)
    assert digests(first) == digests(second)
    assert resolve(f"{first}/").weights_digest == resolve(first).weights_digest


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("model.safetensors", "weights_digest"),
        ("config.json", "config_digest"),
        ("modeling_x.py", "config_digest"),
        ("tokenizer.json", "tokenizer_digest"),
        ("tokenizer_config.json", "tokenizer_digest"),
        ("chat_template.jinja", "template_digest"),
    ],
)
def test_a_byte_changes_one_digest(tmp_path: Path, name: str, changed: str) -> None:
    folder = whole(tmp_path)
    before = digests(folder)
    content = bytearray((folder / name).read_bytes())
    at = content.index(b"300") if name == "config.json" else len(content) - 2  # keep it JSON
    content[at] ^= 1
    (folder / name).write_bytes(content)
    after = digests(folder)
    assert {key for key in DIGESTS if before[key] != after[key]} == {changed}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("added_tokens.json", {"tokenizer_digest"}),
        ("spiece.model", {"tokenizer_digest"}),
        ("additional_chat_templates/x.jinja", {"template_digest"}),
        ("hf_quant_config.json", {"config_digest"}),
        ("README.md", set()),
        ("optimizer.pt", set()),
        ("training_args.bin", set()),
        ("pytorch_model.bin", set()),  # the engine loads the safetensors
    ],
)
def test_a_further_file_counts_where_it_is_used(
    tmp_path: Path, name: str, changed: set[str]
) -> None:
    folder = whole(tmp_path)
    before = digests(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    after = digests(folder)
    assert {key for key in DIGESTS if before[key] != after[key]} == changed


def test_names_count_too(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    before = digests(folder)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert digests(folder)["weights_digest"] != before["weights_digest"]


def test_what_is_recorded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, architectures=["X"], tie_word_embeddings=True)
    files = resolve(folder)
    assert files.record() == {
        "name": str(folder),
        "revision": None,
        **{name: getattr(files, name) for name in DIGESTS},
        "dtype": "float32",
        "architectures": ["X"],
        "tie_word_embeddings": True,
    }
    assert all(len(getattr(files, name)) == 64 for name in DIGESTS)
    assert (files.path, files.folder) == (str(folder), folder)


@pytest.mark.parametrize(
    ("asked", "config", "dtype"),
    [
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {"dtype": None, "torch_dtype": "float16"}, "float16"),
        ("auto", {"dtype": None, "text_config": {"dtype": "float32"}}, "float32"),
        ("float16", {"dtype": "bfloat16"}, "float16"),
        ("float32", {"dtype": None}, "float32"),
    ],
)
def test_dtypes(tmp_path: Path, asked: str, config: dict[str, Any], dtype: str) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False, **config)
    assert resolve(folder, dtype=asked).dtype == dtype


@pytest.mark.parametrize(
    "config",
    [{"dtype": None}, {"dtype": "int4"}, {"dtype": [1]}, {"dtype": None, "text_config": 5}],
)
def test_no_dtype(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False, **config)
    assert "config.json names no dtype that can be used, set model.dtype" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no config.json in it, expected a Hugging Face checkpoint"),
        (b"", "config.json can't be read: Expecting value"),
        (b"{", "config.json can't be read"),
        (b"\xff", "config.json can't be read: 'utf-8' codec"),
        (b"[]", "config.json holds no object"),
        (b"[" * 100_000, "config.json can't be read"),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_damaged_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    assert message in refusal(folder)


def test_weights_that_are_cut_are_refused_at_any_length(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (1, 7, 8, 9, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        message = refusal(folder)
        assert "model.safetensors is damaged or cut short: " in message, length
    path.write_bytes(content)
    resolve(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "model.safetensors is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS pointer, fetch the wei"),
        (b"\xff" * 100, "model.safetensors is damaged or cut short"),
    ],
)
def test_files_that_are_no_weights(tmp_path: Path, content: bytes, message: str) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "model.safetensors").write_bytes(content)
    assert message in refusal(folder)


def test_missing_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "model.safetensors").unlink()
    (folder / "optimizer.pt").write_bytes(b"x")
    assert "no weight file (*.safetensors, *.bin, *.pt)" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert resolve(folder).weights_digest
    (folder / "pytorch_model.bin").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "model.safetensors can't be read: No such file or directory" in refusal(folder)


def test_an_index_names_the_files_that_must_be_there(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name in names[:2]:
        save_file({"w": np.zeros(3, np.float32)}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    before = resolve(folder).weights_digest
    index.write_text(json.dumps({"weight_map": {"a": names[1], "b": names[0]}}))
    assert resolve(folder).weights_digest != before
    index.write_text(json.dumps({"weight_map": dict(zip("abc", names, strict=True))}))
    assert refusal(folder).endswith(f"1 of 3 weight files are missing, the first is {names[2]}")
    for broken in ("{", "{}", "[]", '{"weight_map": [1]}'):
        index.write_text(broken)
        assert "model.safetensors.index.json can't be read" in refusal(folder)


def test_names_that_are_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert refusal(tmp_path / "no").endswith("no such folder")
    assert refusal("./no/model").endswith("no such folder")
    assert refusal("out/no/model").endswith("no such folder")
    assert refusal("~/no such model").endswith("no such folder")
    assert refusal(tmp_path / "file").endswith("a file, expected the folder of a checkpoint")
    folder = make_checkpoint(tmp_path / "m", tokenizer=False)
    assert "model.revision is 'main' but model.path" in refusal(folder, revision="main")


def test_home_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "m", tokenizer=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    files = resolve("~/m")
    assert (files.name, files.path) == ("~/m", str(folder))


_OFFLINE = """
import socket, sys
def refuse(*args, **kwargs):
    raise AssertionError("the network was used")
socket.socket.connect = socket.getaddrinfo = refuse
from rollout.config import ModelConfig
from rollout.errors import InputError
from rollout.model_files import resolve_model
try:
    resolve_model(ModelConfig(path=sys.argv[1]))
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["someone/no-such-model", "no-such-model", "no such: model"])
def test_a_hub_id_offline_gives_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = subprocess.run(
        [sys.executable, "-c", _OFFLINE, name], capture_output=True, text=True, check=True
    )
    (line,) = found.stdout.splitlines()
    assert line.startswith(f"model {name}: no such folder, and the hub did not give it: ")
    assert "the network was used" not in line


def test_a_hub_id_that_is_there_is_pinned_to_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = make_checkpoint(tmp_path / "snapshots" / commit, tokenizer=False)
    (snapshot / "model.safetensors").unlink()  # weights are fetched by the engine
    asked: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        asked.update(kwargs, name=name)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = resolve("someone/model", revision="main")
    assert (asked["name"], asked["revision"]) == ("someone/model", "main")
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])
    assert (files.path, files.revision) == ("someone/model", commit)
    assert files.weights_digest == f"commit:{commit}"
