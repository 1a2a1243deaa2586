"""A tiny untrained causal LM with a byte-level tokenizer, for tests that need a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
    "{{ message['content'] }}{% endfor %}[assistant]"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a cut may fall inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=TEMPLATE,
    )


def make_tiny_model(
    folder: Path,
    *,
    vocab_size: int = 320,
    logit_scale: float = 2.0,
    body_scale: float = 0.15,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    max_length: int = 4096,
    head_bias: dict[int, float] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint whose logits have about the standard deviation `logit_scale`.

    `head_bias` makes ids read one direction of the final norm's output only, widely scaled, so that
    they are now very probable and now improbable.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed" in name or "lm_head" in name:
                weight.normal_(0.0, logit_scale / config.hidden_size**0.5)
            elif weight.ndim == 2:
                weight.normal_(0.0, body_scale)
        if not tied:
            for token, bias in (head_bias or {}).items():
                model.lm_head.weight[token] = 0.0
                model.lm_head.weight[token, 0] = bias
                model.model.norm.weight[0] = 4.0
    model.to(dtype).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    generation = folder / "generation_config.json"
    generation.write_text(
        json.dumps({"eos_token_id": 258} if generation_config is None else generation_config)
    )
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Load a checkpoint with Hugging Face's own code."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()
