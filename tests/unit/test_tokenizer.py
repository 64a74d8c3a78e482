"""Text to ids from the files of a checkpoint: the same ids from both file forms, and never a special one."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonvit.errors import ConfigError, MissingDependencyError
from moonvit.prompts.tokenizer import PATTERN, Tokenizer
from train import vocabulary
from train.batches import encoding

TEXTS = [
    "",
    "What does the text say?",
    "HelloWorld 漢字テスト 12345 it's",
    "  leading and trailing  ",
    "line one\nline two\r\nline three\n\n",
    "<|media_pad|><|im_end|>[EOS]<think></think><|reserved_token_776|>",
    "naïve café — 😀👩‍👩‍👧 ﷽",
    "\x00\x1c\u2028\u00a0x",
]
WORDS = [f"Which {a} is {b}?" for a in ("word", "bar", "shape") for b in ("tallest", "red", "left of the circle")]
BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("demo")
    vocabulary.write(folder)
    return Tokenizer.from_directory(folder)


def write_tiktoken(folder: Path, tokens: list[bytes], specials: dict[str, int] | None = None) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(number): {"content": name, "special": True} for name, number in (specials or {}).items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


def letters(token: bytes) -> str:
    """A byte string in the byte-level alphabet, from the library that defines it."""
    from tokenizers.pre_tokenizers import ByteLevel

    printable = sorted(letter for letter in ByteLevel.alphabet() if ord(letter) < 256)
    others = sorted(letter for letter in ByteLevel.alphabet() if ord(letter) >= 256)
    unnamed = [value for value in range(256) if chr(value) not in printable]
    table = {ord(letter): letter for letter in printable} | dict(zip(unnamed, others, strict=True))
    return "".join(table[value] for value in token)


def write_json(folder: Path, tokens: list[bytes], specials: dict[str, int], *, named_in_vocab: bool = False) -> Path:
    """The same vocabulary as a tokenizer.json, as converters of tiktoken files write it."""
    from tokenizers import Regex, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        splits = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in ranks and token[n:] in ranks]
        merges += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    vocab = {letters(token): rank for token, rank in ranks.items()}
    backend = Backend(BPE(vocab=vocab, merges=[(letters(a), letters(b)) for a, b in merges], ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    whole = json.loads(backend.to_str())
    # Some converters flag the thinking tags as not special; they must stay out of reach all the same.
    whole["added_tokens"] = [
        {
            "id": number,
            "content": name,
            "special": "think" not in name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for name, number in sorted(specials.items(), key=lambda item: item[1])
    ]
    if named_in_vocab:
        whole["model"]["vocab"] |= specials
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize("text", TEXTS)
def test_the_demo_vocabulary_is_the_one_it_was_trained_with(demo: Tokenizer, text: str) -> None:
    assert demo.encode_text(text) == encoding().encode_ordinary(text)


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back_and_holds_no_special(demo: Tokenizer, text: str) -> None:
    ids = demo.encode_text(text)
    assert demo.decode_bytes(ids) == text.encode()
    assert all(number < vocabulary.BASE for number in ids)


def test_the_name_of_no_special_becomes_one(demo: Tokenizer) -> None:
    for name in demo.specials:
        for text in (name, f"a{name}b", name * 2, f" {name}\n"):
            assert not set(demo.encode_text(text)) & set(demo.specials.values())


def test_specials_are_named_and_filled_up(demo: Tokenizer) -> None:
    assert demo.vocab_size == vocabulary.VOCAB == 1024
    assert len(demo.specials) == 256
    assert demo.special_id("<|media_pad|>") == vocabulary.MEDIA_PAD == 789
    assert demo.specials["<|reserved_token_773|>"] == 773
    assert demo.decode_bytes([789, 773]) == b"<|media_pad|><|reserved_token_773|>"
    with pytest.raises(ConfigError, match=r"no special token '<\|media_start\|>'"):
        demo.special_id("<|media_start|>")
    with pytest.raises(ConfigError, match="1024 is not in the vocabulary of 1024"):
        demo.decode_bytes([1024])


GOLDEN = {
    "HelloWorld 漢字テスト 12345 it's": ["Hello", "World", " ", "漢字", "テスト", " ", "123", "45", " it's"],
    "  leading and trailing  ": [" ", " leading", " and", " trailing", "  "],
    "line one\nline two\r\nline three": ["line", " one", "\n", "line", " two", "\r\n", "line", " three"],
    "'LL(x) DON'T!?\n\n": ["'LL", "(x", ")", " DON'T", "!?\n\n"],
}
"""Pieces of the official split pattern; the first three are published with the official ids."""


@pytest.mark.parametrize("form", ["tiktoken", "json"])
@pytest.mark.parametrize("text", GOLDEN)
def test_text_is_split_as_officially(tmp_path: Path, form: str, text: str) -> None:
    """Where every expected piece is a token that no merge builds, only an exact split and a whole look-up find it."""
    pieces = GOLDEN[text]
    assert "".join(pieces) == text
    tokens = BYTES + sorted({piece.encode() for piece in pieces if len(piece.encode()) > 1})
    write = write_tiktoken if form == "tiktoken" else write_json
    tokenizer = Tokenizer.from_directory(write(tmp_path, tokens, {"[EOS]": len(tokens)}))
    assert tokenizer.encode_text(text) == [tokens.index(piece.encode()) for piece in pieces]


@pytest.mark.parametrize("named_in_vocab", [False, True])
def test_both_file_forms_give_the_same_ids(demo: Tokenizer, tmp_path: Path, named_in_vocab: bool) -> None:
    named = {name: number for name, number in demo.specials.items() if "reserved" not in name}
    other = Tokenizer.from_directory(write_json(tmp_path, vocabulary.ranks(), named, named_in_vocab=named_in_vocab))
    assert other.specials == demo.specials
    assert other.vocab_size == demo.vocab_size
    for text in [*TEXTS, *demo.specials, *WORDS]:
        ids = other.encode_text(text)
        assert ids == demo.encode_text(text)
        assert other.decode_bytes(ids) == text.encode()


def test_tiktoken_is_preferred_where_both_are_there(tmp_path: Path) -> None:
    write_json(tmp_path, BYTES, {"[EOS]": 256})
    write_tiktoken(tmp_path, [*BYTES, b"ab"], {"[EOS]": 257})
    assert Tokenizer.from_directory(tmp_path).encode_text("ab") == [256]


@pytest.mark.parametrize("form", ["tiktoken", "json"])
def test_long_runs_and_long_texts_are_cut_as_officially(tmp_path: Path, form: str) -> None:
    tokens = [*BYTES, b"a" * 25_000, b" " * 25_000, b" ab", b"ab"]
    tokenizer = Tokenizer.from_directory(
        (write_tiktoken if form == "tiktoken" else write_json)(tmp_path, tokens, {"[EOS]": len(tokens)})
    )
    assert tokenizer.encode_text("a" * 51_000) == [256, 256, *[97] * 1000]
    assert tokenizer.encode_text("." + "a" * 25_000 + "\n") == [46, *[97] * 24_999, 97, 10]
    assert tokenizer.encode_text(" " * 50_001) == [257, 257, 32]
    # 400,000 characters end between a blank and its word.
    assert tokenizer.encode_text(" ab" * 150_000) == [258] * 133_333 + [32, 259] + [258] * 16_666


def test_half_a_surrogate_pair_becomes_a_replacement_character(demo: Tokenizer) -> None:
    assert demo.decode_bytes(demo.encode_text("a\ud83d\ude00b")).decode() == "a😀b"
    assert demo.decode_bytes(demo.encode_text("a\ud800b")).decode() == "a\ufffdb"


def test_no_code_of_the_checkpoint_runs(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, BYTES, {"[EOS]": 256})
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.Evil", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization_kimi.py").write_text("raise SystemExit('ran')")
    assert Tokenizer.from_directory(tmp_path).encode_text("hi") == [104, 105]
    assert "tokenization_kimi" not in sys.modules


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["not base64! 0"], "line 1 of .* is not a base64 token and a rank"),
        (["AA=="], "line 1 of .* is not a base64 token and a rank"),
        (["AA== zero"], "line 1 of .* is not a base64 token and a rank"),
        (["AA== 0", "AQ== 0"], "2 tokens of .* do not have the ranks 0 to 1"),
        (["AA== 0", "AQ== 2"], "2 tokens of .* do not have the ranks 0 to 1"),
        (["AA== 0", "AQ== 1"], "lacks 254 of the 256 single bytes, the first is 2"),
    ],
)
def test_a_damaged_tiktoken_file_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "holds list"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "not an object of ids and contents"),
        ('{"added_tokens_decoder": {"256": "a"}}', "not an object of ids and contents"),
        ('{"added_tokens_decoder": {"97": {"content": "[EOS]"}}}', "'\\[EOS\\]' has the id 97 of an ordinary"),
        (
            '{"added_tokens_decoder": {"256": {"content": "[EOS]"}, "257": {"content": "[EOS]"}}}',
            "'\\[EOS\\]' the ids 256 and 257",
        ),
    ],
)
def test_a_contradictory_config_is_refused(tmp_path: Path, config: str, message: str) -> None:
    write_tiktoken(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither tiktoken.model nor tokenizer.json"):
        Tokenizer.from_directory(tmp_path)
    write_tiktoken(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}}}, "not a byte-level BPE"),
        ({"pre_tokenizer": None}, "not a byte-level BPE"),
        ({"model": {"type": "BPE"}}, "lacks what a byte-level BPE has"),
        ({"added_tokens": [{"id": 256}]}, "lacks what a byte-level BPE has"),
        ({"model": {"type": "BPE", "vocab": {"a b": 0}, "merges": []}}, "ordinary token with ' '"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "cannot read"),
    ],
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_json(tmp_path, BYTES, {"[EOS]": 256}) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(("package", "write"), [("tiktoken", write_tiktoken), ("tokenizers", write_json)])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, write: Any) -> None:
    write(tmp_path, BYTES, {"[EOS]": 256})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=rf"needs {package}: pip install"):
        Tokenizer.from_directory(tmp_path)
