"""A model small enough for a laptop's CPU, with random weights and a tokenizer of bytes: to try the real path.

Its text is noise; its scheduling is vLLM's. One byte of a prompt is one token.
"""

import json
import random
import string
from pathlib import Path
from typing import Any

NAME = "tiny"
END = 256
VOCABULARY = 264
"""256 bytes, the end token, and rows that round the matrix up."""
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
"""vLLM's CPU attention takes multiples of 32."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
    "torch_dtype": "float32",
    "bos_token_id": END,
    "eos_token_id": END,
}


SMALL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "num_hidden_layers": 12,
}
"""A larger one, whose steps are bound by computing where those of the tiny one are bound by everything around it."""


def write_tiny_model(folder: Path, small: bool = False) -> None:
    """Write config.json and the tokenizer of the model, or of the larger one, into an existing folder."""
    files = {
        "config.json": CONFIG | SMALL if small else CONFIG,
        "generation_config.json": {"bos_token_id": END, "eos_token_id": END},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|end|>",
            "eos_token": "<|end|>",
            "model_max_length": MAX_MODEL_LEN,
            "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: ",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def text_of(tokens: int, rng: random.Random) -> str:
    """A prompt of so many tokens for the model, where a token is a byte; no two begin alike."""
    return "".join(rng.choices(string.ascii_letters, k=tokens))


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE without merges, as the tokenizers library reads it."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    special = [
        {
            "id": END + i,
            "content": "<|end|>" if i == 0 else f"<|{i}|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i in range(VOCABULARY - END)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letter: i for i, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary: itself, or one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, spare = [], 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters
