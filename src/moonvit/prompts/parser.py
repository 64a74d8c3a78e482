"""Token ids of an answer to content, reasoning and tool calls, piece by piece, with no protocol marker left in.

A marker is recognised by its special id and also where the model spells it out, in tokens cut at any byte. What may
still become a marker is held back; so is a character whose bytes are not all there.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from moonvit.prompts.tokenizer import Tokenizer


@dataclass(frozen=True)
class Content:
    """A piece of the answer; never empty."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of the thinking before the answer; never empty."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; ``index`` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of the arguments of call ``index``; never empty."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class Mark(Enum):
    """What a marker does."""

    THINK = auto()
    END_THINK = auto()
    SECTION = auto()
    END_SECTION = auto()
    CALL = auto()
    ARGUMENTS = auto()
    END_CALL = auto()
    NOISE = auto()


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    BETWEEN_CALLS = auto()
    CALL_ID = auto()
    CALL_ARGUMENTS = auto()
    SKIPPED_CALL = auto()


_CALL_STATES = (_State.CALL_ID, _State.CALL_ARGUMENTS, _State.SKIPPED_CALL)
_ENDS_OF_ARGUMENTS = (Mark.END_CALL, Mark.END_SECTION, Mark.CALL, Mark.SECTION)
_CALL_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?P<index>:\d+)?", re.DOTALL)


class _Matcher:
    """Finds markers in bytes, and the tail that may still become one."""

    def __init__(self, markers: Mapping[bytes, Mark]) -> None:
        self.markers = dict(markers)
        self.pattern = re.compile(b"|".join(map(re.escape, markers)) or b"(?!)")
        self._beginnings = {name[:n] for name in markers for n in range(1, len(name))}
        self._longest = max(map(len, markers), default=1) - 1

    def tail(self, data: bytes) -> int:
        """Length of the longest end of ``data`` that is the beginning of a marker."""
        for size in range(min(len(data), self._longest), 0, -1):
            if data[-size:] in self._beginnings:
                return size
        return 0


class OutputParser:
    """Reads one answer.

    Args:
        tokenizer: The vocabulary.
        markers: What each marker does, by its text. Those that are special tokens are known by id as well; every
            other special token is noise.
        stop_ids: Ids that end the answer.
        reasoning: Whether the prompt has already opened the thinking.

    Attributes:
        reasoning_tokens: Tokens read so far that were thinking, the closing marker among them.
        calls: Tool calls begun so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, markers: Mapping[str, Mark], stop_ids: frozenset[int], *, reasoning: bool
    ) -> None:
        self.reasoning_tokens = 0
        self.calls = 0
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._marks = {number: markers.get(name, Mark.NOISE) for name, number in tokenizer.specials.items()}
        spelled = {name.encode(): mark for name, mark in markers.items()}
        self._everywhere = _Matcher(spelled)
        # Arguments are data: a file that the model writes may well hold a think tag, or quote a whole tool call. They
        # end as they began, spelled out or by a special token, if there is one.
        ends = {name: mark for name, mark in markers.items() if mark in _ENDS_OF_ARGUMENTS}
        self._in_spelled_call = _Matcher({name.encode(): mark for name, mark in ends.items()})
        self._in_call = _Matcher({name.encode(): mark for name, mark in ends.items() if name not in tokenizer.specials})
        self._spelled = False
        self._state = _State.REASONING if reasoning else _State.CONTENT
        self._held = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._call_id = ""
        self._empty = True
        self._stopped = False
        self._events: list[Event] = []

    def feed(self, token_id: int) -> list[Event]:
        """Read the next token. The stop token may be fed too, and tells ``finish`` that the answer is whole.

        Args:
            token_id: The token.

        Returns:
            What has become certain with it, often nothing.

        Raises:
            ConfigError: If the id is not in the vocabulary.
        """
        if self._stopped:
            return []
        self.reasoning_tokens += self._state is _State.REASONING and token_id not in self._stop_ids
        if token_id in self._stop_ids:
            self._stopped = True
        elif (mark := self._marks.get(token_id)) is not None:
            self._release()
            self._apply(mark, spelled=False)
        else:
            self._read(self._tokenizer.decode_bytes([token_id]))
        return self._take()

    def finish(self, *, truncated: bool | None = None) -> list[Event]:
        """End the answer.

        Args:
            truncated: Whether it was cut short, so that a last piece which looks like the beginning of a marker is
                one and is dropped. By default: whether no stop token has been fed.

        Returns:
            What was still held; bytes of an unfinished character become U+FFFD.
        """
        cut = not self._stopped if truncated is None else truncated
        # Bytes short of one whole character are no evidence of a marker.
        if cut and self._held.decode("utf-8", "ignore"):
            self._held = b""
        self._release()
        if self._state in _CALL_STATES and not cut:
            self._end_call()
        self._stopped = True
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _read(self, data: bytes) -> None:
        data = self._held + data
        self._held = b""
        while True:
            matcher = self._matcher()
            found = matcher.pattern.search(data)
            if found is None:
                break
            self._emit(self._decoder.decode(data[: found.start()], final=True))
            self._apply(matcher.markers[found.group()], spelled=True)
            data = data[found.end() :]
        kept = len(data) - matcher.tail(data)
        self._held = data[kept:]
        self._emit(self._decoder.decode(data[:kept]))

    def _matcher(self) -> _Matcher:
        if self._state is not _State.CALL_ARGUMENTS:
            return self._everywhere
        return self._in_spelled_call if self._spelled else self._in_call

    def _release(self) -> None:
        """Nothing can continue the held bytes any more: they are text."""
        held, self._held = self._held, b""
        self._emit(self._decoder.decode(held, final=True))

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.CONTENT:
            self._events.append(Content(text))
        elif self._state is _State.REASONING:
            self._events.append(Reasoning(text))
        elif self._state is _State.CALL_ID:
            self._call_id += text
        elif self._state is _State.CALL_ARGUMENTS:
            self._events.append(CallArguments(self.calls - 1, text))
            self._empty = False

    def _apply(self, mark: Mark, *, spelled: bool) -> None:
        inside = self._state in (*_CALL_STATES, _State.BETWEEN_CALLS)
        if mark is Mark.THINK and not inside:
            self._state = _State.REASONING
        elif mark is Mark.END_THINK and not inside:
            self._state = _State.CONTENT
        elif mark is Mark.SECTION or mark is Mark.END_CALL:
            if mark is Mark.SECTION or inside:
                self._end_call()
                self._state = _State.BETWEEN_CALLS
        elif mark is Mark.CALL:
            self._end_call()
            self._state = _State.CALL_ID
        elif mark is Mark.ARGUMENTS and self._state is _State.CALL_ID:
            self._spelled = spelled
            self._begin_call()
        elif mark is Mark.END_SECTION and inside:
            self._end_call()
            self._state = _State.CONTENT

    def _begin_call(self) -> None:
        raw, self._call_id = self._call_id.strip(), ""
        found = _CALL_ID.fullmatch(raw)
        if found is None:
            self._state = _State.SKIPPED_CALL
            return
        name = found["name"]
        self._events.append(CallStart(self.calls, raw if found["index"] else f"functions.{name}:{self.calls}", name))
        self.calls += 1
        self._empty = True
        self._state = _State.CALL_ARGUMENTS

    def _end_call(self) -> None:
        if self._state is _State.CALL_ID:
            self._begin_call()
        if self._state is _State.CALL_ARGUMENTS and self._empty:
            # A call without arguments must still be JSON to whoever reads it.
            self._events.append(CallArguments(self.calls - 1, "{}"))
