"""Chat formats: conversations to token ids, and token ids of answers to content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moonvit.errors import ConfigError
from moonvit.families import read_json
from moonvit.prompts.chat import ChatFormat, Prompt, placeholder_id
from moonvit.prompts.kimi_k25 import KimiK25Format
from moonvit.prompts.kimi_vl import KimiVLFormat
from moonvit.prompts.parser import CallArguments, CallStart, Content, Event, OutputParser, Reasoning
from moonvit.prompts.tokenizer import Tokenizer

__all__ = [
    "CallArguments",
    "CallStart",
    "ChatFormat",
    "Content",
    "Event",
    "OutputParser",
    "Prompt",
    "Reasoning",
    "Tokenizer",
    "chat_format",
]


def chat_format(config: Mapping[str, Any], directory: str | Path, *, preserve_thinking: bool = False) -> ChatFormat:
    """The chat format of a checkpoint.

    Args:
        config: Content of its ``config.json``.
        directory: Where its tokenizer, and ``generation_config.json`` if it has one, are.
        preserve_thinking: Keep the thinking of every earlier answer in the prompt, as K2.6 can and K2.7-Code always
            does; they cannot be told from K2.5 by their files. Kimi-VL has no such choice.

    Returns:
        The format that ``model_type`` asks for.

    Raises:
        ConfigError: If no format is known for the model type, the files contradict each other, or
            ``preserve_thinking`` is asked of a Kimi-VL.
        MissingDependencyError: If the package that reads the tokenizer is not installed.
    """
    folder = Path(directory)
    kind = config.get("model_type")
    if kind not in ("kimi_vl", "kimi_k25"):
        raise ConfigError(f"no chat format is known for model_type {kind!r}; known are 'kimi_vl' and 'kimi_k25'")
    tokenizer = Tokenizer.from_directory(folder)
    placeholder = placeholder_id(config, tokenizer)
    eos = _eos_ids(config, folder, tokenizer)
    if kind == "kimi_vl":
        if preserve_thinking:
            raise ConfigError("preserve_thinking is True, but the format of kimi_vl holds no thinking")
        return KimiVLFormat(tokenizer, placeholder, eos)
    return KimiK25Format(tokenizer, placeholder, eos, preserve_thinking=preserve_thinking)


def _eos_ids(config: Mapping[str, Any], folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids that end an answer, from every file that names some."""
    sources: dict[str, Any] = {"config.json": config.get("eos_token_id")}
    path = folder / "generation_config.json"
    if path.is_file():
        sources[path.name] = read_json(path).get("eos_token_id")
    ids: list[int] = []
    for name, value in sources.items():
        for number in value if isinstance(value, list) else [value]:
            if number is None:
                continue
            if not isinstance(number, int) or not 0 <= number < tokenizer.vocab_size:
                raise ConfigError(
                    f"eos_token_id {number!r} of {name} is not an id of the vocabulary of {tokenizer.vocab_size}"
                )
            ids.append(number)
    return ids
