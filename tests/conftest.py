"""Tiny seeded targets, a byte-level tokenizer with a chat template, and conversations to train on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headstart.inference import Target

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>")


def build_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """256 bytes and two special tokens: V = 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = chat_template
    return fast


def build_model(
    vocab_size: int = 258, seed: int = 0, layers: int = 2, dtype: torch.dtype = torch.float64
) -> LlamaForCausalLM:
    """A random Llama whose next token really depends on its prefix."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 4
    return model.to(dtype).eval()


@pytest.fixture
def tiny_target() -> Callable[..., Target]:
    """Builds a random target: `tiny_target(vocab_size=..., seed=..., layers=..., dtype=...)`."""
    return lambda **options: Target(build_model(**options))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with its tokenizer, as a folder that every command takes; float32, 258 tokens."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = build_tokenizer()
    model = build_model(dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def conversations_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 short conversations with answers that can be learned."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    rows = []
    for i in range(24):
        messages = [
            {"role": "user", "content": f"count to {i % 5 + 3}"},
            {"role": "assistant", "content": " ".join(str(number) for number in range(1, i % 5 + 4))},
        ]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path
