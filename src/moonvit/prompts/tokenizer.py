"""Text to token ids and back, from the files of a checkpoint and never from its code.

Two forms are read: ``tiktoken.model`` with ``tokenizer_config.json`` (what Kimi checkpoints hold) and
``tokenizer.json``. Either way the vocabulary falls in two: base ranks, which text is made of, and special tokens,
which only a prompt format may write. ``encode_text`` cannot produce a special id, whatever the text says.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonvit.errors import ConfigError, MissingDependencyError
from moonvit.families import read_json

PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
"""How Kimi's tokenizer cuts text into pieces before merging; ``&&`` is set intersection."""
SPECIALS = 256
"""Special tokens of every Kimi vocabulary; they follow the base ranks."""
SLICE = 400_000
"""Characters handed to the merger at once, as in the official tokenizer."""
RUN = 25_000
"""Longest run of only blanks, or of no blanks, that is kept in one piece."""

_RUNS = re.compile(r"\s+|\S+")


class Tokenizer:
    """One vocabulary.

    Args:
        base: Bytes of every base token by id.
        specials: Id of every special token by name; none of them may be in ``base``.
        encode: Turns one slice of text into base ids.

    Attributes:
        specials: Id of every special token by name, unnamed ones as ``<|reserved_token_{id}|>``.
        vocab_size: One more than the largest id.
    """

    def __init__(
        self, base: Mapping[int, bytes], specials: Mapping[str, int], encode: Callable[[str], list[int]]
    ) -> None:
        self.specials: dict[str, int] = dict(specials)
        self._bytes = dict(base)
        for name, number in self.specials.items():
            if number in self._bytes:
                raise ConfigError(f"special token {name!r} has the id {number} of an ordinary token or of another one")
            self._bytes[number] = name.encode()
        self.vocab_size = max(self._bytes) + 1
        self._encode = encode

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read the vocabulary of a checkpoint.

        ``tiktoken.model`` is taken where both forms are there: it is the one the model was trained with.

        Args:
            path: Directory with ``tiktoken.model`` and ``tokenizer_config.json``, or with ``tokenizer.json``.

        Returns:
            The tokenizer.

        Raises:
            ConfigError: If no file is there, or a file is damaged.
            MissingDependencyError: If ``tiktoken`` or ``tokenizers``, whichever is needed, is not installed.
        """
        directory = Path(path)
        if (directory / "tiktoken.model").is_file():
            return cls(*_from_tiktoken(directory))
        if (directory / "tokenizer.json").is_file():
            return cls(*_from_json(directory / "tokenizer.json"))
        raise ConfigError(f"{directory} holds neither tiktoken.model nor tokenizer.json")

    def encode_text(self, text: str) -> list[int]:
        """Encode what somebody typed. The name of a special token in it is ordinary text.

        Args:
            text: Any string; half of a surrogate pair becomes U+FFFD.

        Returns:
            Base ids; never the id of a special token.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for piece in _slices(text):
            ids += self._encode(piece)
        return ids

    def special_id(self, name: str) -> int:
        """Id of a special token.

        Args:
            name: Its text, such as ``<|im_end|>``.

        Returns:
            The id.

        Raises:
            ConfigError: If the vocabulary has no such token.
        """
        try:
            return self.specials[name]
        except KeyError:
            raise ConfigError(f"the vocabulary of {self.vocab_size} tokens has no special token {name!r}") from None

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Bytes of some tokens; they may end inside a character.

        Args:
            ids: Token ids; a special token gives its name.

        Returns:
            The bytes, joined.

        Raises:
            ConfigError: If an id is not in the vocabulary.
        """
        try:
            return b"".join([self._bytes[number] for number in ids])
        except KeyError as error:
            raise ConfigError(
                f"token id {error.args[0]} is not in the vocabulary of {self.vocab_size} tokens"
            ) from None


def _slices(text: str) -> Iterator[str]:
    if len(text) <= RUN:
        yield text
        return
    for begin in range(0, len(text), SLICE):
        part = text[begin : begin + SLICE]
        start = 0
        for run in _RUNS.finditer(part):
            for cut in range(run.start() + RUN, run.end(), RUN):
                yield part[start:cut]
                start = cut
        yield part[start:]


def _from_tiktoken(directory: Path) -> tuple[dict[int, bytes], dict[str, int], Callable[[str], list[int]]]:
    try:
        import tiktoken
    except ImportError as error:
        raise MissingDependencyError("tiktoken.model needs tiktoken: pip install 'moonvit[serve]'") from error
    path = directory / "tiktoken.model"
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"line {number} of {path} is not a base64 token and a rank: {line[:80]!r}") from None
    base = {rank: token for token, rank in ranks.items()}
    if sorted(base) != list(range(len(ranks))):
        raise ConfigError(f"the {len(ranks)} tokens of {path} do not have the ranks 0 to {len(ranks) - 1}")
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise ConfigError(f"{path} lacks {len(missing)} of the 256 single bytes, the first is {missing[0]}")
    specials = _specials(directory / "tokenizer_config.json", len(base))
    encoding = tiktoken.Encoding("moonvit", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return base, specials, encoding.encode_ordinary


def _specials(path: Path, first: int) -> dict[str, int]:
    added = read_json(path).get("added_tokens_decoder", {})
    names: dict[int, str] = {number: f"<|reserved_token_{number}|>" for number in range(first, first + SPECIALS)}
    try:
        names.update({int(number): str(entry["content"]) for number, entry in added.items()})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(f"added_tokens_decoder of {path} is not an object of ids and contents") from None
    return _by_name(names.items(), path)


def _by_name(pairs: Any, path: Path) -> dict[str, int]:
    specials: dict[str, int] = {}
    for number, name in sorted(pairs):
        if name in specials:
            raise ConfigError(f"{path} gives the special token {name!r} the ids {specials[name]} and {number}")
        specials[name] = number
    return specials


def _byte_of() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def _from_json(path: Path) -> tuple[dict[int, bytes], dict[str, int], Callable[[str], list[int]]]:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise MissingDependencyError("tokenizer.json needs tokenizers: pip install 'moonvit[serve]'") from error
    whole = read_json(path)
    try:
        specials = _by_name([(int(token["id"]), str(token["content"])) for token in whole.pop("added_tokens")], path)
        model = whole["model"]
        names = set(specials.values())
        vocabulary = {token: int(number) for token, number in model["vocab"].items() if number not in names}
        if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(whole.get("pre_tokenizer")):
            raise ConfigError(f"{path} is not a byte-level BPE")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} lacks what a byte-level BPE has: {error!r}") from error
    byte_of = _byte_of()
    try:
        base = {number: bytes([byte_of[char] for char in token]) for token, number in vocabulary.items()}
    except KeyError as error:
        raise ConfigError(
            f"{path} has an ordinary token with {error.args[0]!r}, which is no byte-level letter"
        ) from None
    # Without its added tokens the backend has no name it could find in a text, whether flagged special or not.
    whole |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    whole["model"] = model | {"vocab": vocabulary}
    try:
        backend = Backend.from_str(json.dumps(whole))
    except Exception as error:
        raise ConfigError(f"cannot read {path}: {error}") from error

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    # Names of the 256 places that no file names follow the base ranks, as in the other form.
    taken = set(base) | set(specials.values())
    first = max(base) + 1
    specials |= {f"<|reserved_token_{n}|>": n for n in range(first, first + SPECIALS) if n not in taken}
    return base, specials, encode
