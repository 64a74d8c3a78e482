"""The OpenAI answer shapes: the deltas of an engine as chunks of a stream, or as one message."""

from __future__ import annotations

import time
from typing import Any

from moonvit.engines import Delta, Usage


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Usage in the OpenAI shape.

    Args:
        usage: What the engine counted.

    Returns:
        The object; picture and reasoning tokens are in the details.
    """
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "image_tokens": usage.image_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


class Answer:
    """Shapes the deltas of one answer, as chunks of a stream or gathered into one message.

    Args:
        id: Name of the completion.
        model: Name of the model.
        include_usage: End the stream with a chunk of usage.
    """

    def __init__(self, id: str, model: str, *, include_usage: bool = False) -> None:
        self.usage = Usage()
        self._base = {"id": id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None

    def _chunk(self, delta: dict[str, Any] | None, finish: str | None = None) -> dict[str, Any]:
        choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]
        chunk = {**self._base, "object": "chat.completion.chunk", "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage_dict(self.usage) if delta is None else None
        return chunk

    def opening(self) -> dict[str, Any]:
        """The chunk that says who speaks.

        Returns:
            A ``chat.completion.chunk``.
        """
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks that carry one delta.

        Args:
            delta: A piece of the answer.

        Returns:
            ``chat.completion.chunk`` objects, none for an empty delta. The finish reason stands in a chunk alone.
        """
        body: dict[str, Any] = {}
        if delta.reasoning:
            body["reasoning_content"] = delta.reasoning
        if delta.content:
            body["content"] = delta.content
        if delta.tool_calls:
            body["tool_calls"] = [
                self._call(call.index, call.id, call.name, call.arguments) for call in delta.tool_calls
            ]
        result = [self._chunk(body)] if body else []
        if delta.usage is not None:
            self.usage = delta.usage
        if delta.finish_reason is not None:
            result.append(self._chunk({}, delta.finish_reason))
            if self._include_usage:
                result.append(self._chunk(None))
        return result

    @staticmethod
    def _call(index: int, id: str | None, name: str | None, arguments: str) -> dict[str, Any]:
        if id is None and name is None:
            return {"index": index, "function": {"arguments": arguments}}
        return {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def add(self, delta: Delta) -> None:
        """Gather one delta into the message.

        Args:
            delta: A piece of the answer.
        """
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            entry = self._calls.setdefault(
                call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            entry["id"] = call.id or entry["id"]
            entry["function"]["name"] = call.name or entry["function"]["name"]
            entry["function"]["arguments"] += call.arguments
        self._finish = delta.finish_reason or self._finish
        self.usage = delta.usage or self.usage

    def completion(self) -> dict[str, Any]:
        """The whole answer.

        Returns:
            A ``chat.completion``; ``content`` is null where there are only tool calls.
        """
        content = "".join(self._content)
        reasoning = "".join(self._reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [self._calls[index] for index in sorted(self._calls)]
        choice = {"index": 0, "message": message, "finish_reason": self._finish, "logprobs": None}
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_dict(self.usage),
        }
