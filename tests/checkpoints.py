"""Checkpoint folders of a few kilobytes: no model that could run, but real files of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCAB = 300
BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'boom' %}"
    "{{ raise_exception('no such role:\n' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '!' if loud else '.' }}{% endif %}"
)


def make_tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte (ids follow the byte-level alphabet), then <bos> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>")])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )


def make_checkpoint(folder: Path, *, tokenizer: bool = True, **config: Any) -> Path:
    """Write config.json, weights and, if asked for, a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "qwen3", "vocab_size": VOCAB, "dtype": "float32"} | config
    (folder / "config.json").write_text(json.dumps(values))
    save_file({"w": np.arange(64, dtype=np.float32)}, folder / "model.safetensors")
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder
