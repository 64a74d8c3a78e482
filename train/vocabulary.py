"""The demo model's own small vocabulary: 256 bytes, the words of its questions, and Kimi's special tokens.

The layout mirrors the official one: base ranks first, then 256 special tokens in the official order, so that
special token 163,584 + i there is BASE + i here. A word of a question is one token with its leading space; strings
that are read from pictures stay single characters.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

BASE = 768
"""Base ranks; special tokens follow."""
SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
VOCAB = BASE + 256
IM_END, MEDIA_PAD, PAD, EOS = BASE + 2, BASE + 21, BASE + 255, BASE + 1


def special(name: str) -> int:
    """Id of a special token."""
    return BASE + next(i for i, known in SPECIALS.items() if known == name)


def ranks() -> list[bytes]:
    """The base vocabulary in rank order.

    Returns:
        768 byte strings: single bytes, then those of ``vocabulary.txt``: role names, and the words of the questions
        and some common words with a leading space, each after its own prefixes so that pair merging reaches it.
    """
    words = Path(__file__).with_name("vocabulary.txt").read_text().removesuffix("\n").split("\n")
    return [bytes([value]) for value in range(256)] + [word.encode() for word in words]


def write(folder: Path, media_begin: str = "<|media_begin|>") -> None:
    """Write ``tiktoken.model`` and ``tokenizer_config.json``.

    Args:
        folder: Where to.
        media_begin: What the family calls the token in front of a picture.
    """
    lines = [base64.b64encode(token).decode() + f" {rank}" for rank, token in enumerate(ranks())]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added: dict[str, Any] = {
        str(BASE + offset): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for offset, name in (SPECIALS | {18: media_begin}).items()
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 32768,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
