"""``EmbeddedEngine``: Kimi-VL and Kimi-K2.5 checkpoints answered in this process.

A request is checked whole before anything is done for it: picture headers give grids, grids give placeholders, the
prompt gives its length. Then, a step at a time and in turn with other requests: micro-batches through the vision
encoder, chunks of the prompt through the decoder, tokens. Features take the place of placeholders in the embeddings, so
a placeholder's id is never looked up. A chunk never ends inside a picture.

Shape suffixes: S positions of a sequence, M merged tokens, E language width, V vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moonvit.checkpoint import read_config, resolve
from moonvit.encoder import VisionEncoder
from moonvit.engines import (
    Delta,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    RequestCost,
    ToolCallDelta,
    Usage,
    default_model,
)
from moonvit.engines.embedded.decoder import Decoder
from moonvit.engines.embedded.sampling import Defaults, Sampler, StopStrings, check_sampling, defaults_from_dict
from moonvit.engines.embedded.worker import Job, Steps, Worker
from moonvit.errors import CheckpointError, ConfigError, EngineError, MoonvitError, RequestError, TooLargeError
from moonvit.families import read_json
from moonvit.plan import Batch, Budget, Plan
from moonvit.prompts import CallArguments, CallStart, ChatFormat, Content, Event, Prompt, Reasoning, chat_format
from moonvit.prompts.messages import ImagePart
from moonvit.sources import DEFAULT_LIMITS, FetchPolicy, Limits, fetch_bytes, is_address

GENERATION = "generation_config.json"
PREFILL = 512
"""Positions of a prompt that go through the decoder at once, unless a picture alone has more."""


@dataclass
class _Prepared:
    """A request that was found good.

    Attributes:
        prompt: Ids and places of pictures.
        pictures: The pictures, in order.
        plan: What they take; None where there are none.
        max_tokens: Tokens to generate at most.
    """

    prompt: Prompt
    pictures: list[ImagePart]
    plan: Plan | None
    max_tokens: int

    @property
    def image_tokens(self) -> int:
        return sum(length for _, length in self.prompt.spans)


class EmbeddedEngine:
    """An engine in this process.

    Args:
        encoder: Tower and projector.
        decoder: Language model of the same checkpoint, in the same dtype.
        prompts: Chat format of the same checkpoint.
        name: What requests call the model.
        defaults: How to sample where a request does not say; None is greedy.
        prefill: Positions of a prompt that go through the decoder at once.
        max_active: Requests that take turns; each holds a cache of its own.
        max_waiting: Requests that may wait for a turn; the next is refused.

    Attributes:
        info: What is served.
        encoder: Tower and projector.
        decoder: Language model.
        prompts: Chat format.

    Raises:
        ConfigError: Encoder, decoder and vocabulary do not fit each other, or a number is below 1.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        decoder: Decoder,
        prompts: ChatFormat,
        *,
        name: str,
        defaults: Defaults | None = None,
        prefill: int = PREFILL,
        max_active: int = 8,
        max_waiting: int = 64,
    ) -> None:
        _at_least_one(prefill=prefill, max_active=max_active, max_waiting=max_waiting)
        width = encoder.config.text_hidden_size
        if width != decoder.width:
            raise ConfigError(f"the projector gives {width} values a token, the language model takes {decoder.width}")
        _check_ids(prompts.stop_ids, decoder)
        self.encoder = encoder
        self.decoder = decoder
        self.prompts = prompts
        self._defaults = defaults or Defaults()
        self._owner = False
        self._prefill = prefill
        self._worker = Worker(max_active, max_waiting)
        tower = sum(parameter.numel() for parameter in encoder.model.parameters())
        self.info = EngineInfo(
            model=name,
            family=encoder.config.family,
            max_context=decoder.max_context,
            details={
                "engine": "embedded",
                "parameters": tower + decoder.parameters,
                "vision_parameters": tower,
                "dtype": str(encoder.dtype).removeprefix("torch."),
                "device": str(encoder.device),
                "budget": str(encoder.budget),
                "temperature": self._defaults.temperature,
                "top_p": self._defaults.top_p,
                "max_active": max_active,
            },
            vision=encoder.config,
        )

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        budget: Budget | int | str = "auto",
        limits: Limits = DEFAULT_LIMITS,
        fetch: FetchPolicy | None = None,
        name: str | None = None,
        preserve_thinking: bool = False,
        prefill: int = PREFILL,
        max_active: int = 8,
        max_waiting: int = 64,
    ) -> EmbeddedEngine:
        """Load a checkpoint in the official layout.

        Args:
            path: Directory, or ``owner/name`` on the Hugging Face hub.
            device: Where it works.
            dtype: As ``VisionEncoder.from_pretrained`` takes it.
            budget: Bytes the vision encoder may use beyond weights, inputs and outputs.
            limits: What untrusted pictures may be.
            fetch: Who may be asked for http(s) pictures; None refuses them all.
            name: What requests call the model; None takes the last part of the path.
            preserve_thinking: As ``moonvit.prompts.chat_format`` takes it; a request may say otherwise.
            prefill: As in the constructor.
            max_active: As in the constructor.
            max_waiting: As in the constructor.

        Returns:
            The engine, ready.

        Raises:
            CheckpointError: Files are missing or broken, or the tensors are not exactly those of the model.
            ConfigError: The model is not supported, or its files contradict each other.
            MissingDependencyError: A package of ``moonvit[serve]`` is not installed.
        """
        _at_least_one(prefill=prefill, max_active=max_active, max_waiting=max_waiting)
        local = resolve(path, whole=True)
        if not local.is_dir():
            raise CheckpointError(f"{path} is a file; an engine needs the directory of a checkpoint")
        _, raw = read_config(local)
        # What is wrong with the small files is said before the large ones are read.
        prompts = chat_format(raw, local, preserve_thinking=preserve_thinking)
        generation = read_json(local / GENERATION) if (local / GENERATION).is_file() else {}
        defaults = defaults_from_dict(generation)
        encoder = VisionEncoder.from_pretrained(
            local, device=device, dtype=dtype, budget=budget, limits=limits, fetch=fetch
        )
        decoder = Decoder.from_directory(local, raw, device=encoder.device, dtype=encoder.dtype)
        engine = cls(
            encoder,
            decoder,
            prompts,
            name=name or _model_name(path, local),
            defaults=defaults,
            prefill=prefill,
            max_active=max_active,
            max_waiting=max_waiting,
        )
        engine._owner = True
        return engine

    # -- the protocol --

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """Answer a request, piece by piece. Closing the iterator cancels the work.

        Args:
            request: Pictures are anything ``moonvit.images.open_picture`` reads.

        Yields:
            Pieces; the last one carries the reason and the usage.

        Raises:
            RequestError: A setting is out of range, or prompt and ``max_tokens`` do not fit the context together.
            TooLargeError: The prompt alone does not fit the context.
            PromptError: The chat format has no place for something.
            ImageError: A picture cannot be read.
            BudgetError: A picture needs more than the budget.
            OverloadedError: Too many requests wait.
            EngineError: The engine was closed, or ran out of memory.
        """
        check_sampling(request.sampling)
        if not self._worker.alive:
            raise EngineError("the engine has stopped")
        prepared = await asyncio.to_thread(self._prepare, request)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Delta | BaseException | None]()

        def deliver(item: Delta | BaseException | None) -> None:
            # A loop that is closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(queue.put_nowait, item)

        job = Job(self._steps(request, prepared), deliver, request.id)
        self._worker.submit(job)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._worker.cancel(job)

    async def count_tokens(self, request: GenerateRequest) -> RequestCost:
        """Count a request without running the tower or the decoder.

        Args:
            request: Pictures may also be ``(width, height)``, upright.

        Returns:
            Tokens, and the plan of the pictures.

        Raises:
            MoonvitError: As for ``generate``, but for the length of the prompt.
        """
        prompt, _, plan = await asyncio.to_thread(self._render, request)
        return RequestCost(
            prompt_tokens=len(prompt.ids),
            image_tokens=sum(length for _, length in prompt.spans),
            plan=None if plan is None else plan.to_dict(),
        )

    async def health(self) -> bool:
        """Whether the next request can be answered."""
        return self._worker.alive

    async def close(self) -> None:
        """Stop after the step in progress; requests that are not over get an ``EngineError``.

        The weights of an engine that was made by ``from_pretrained`` are freed.
        """
        await asyncio.to_thread(self._worker.close)
        if self._owner:
            # Storage goes, shapes stay: counting still works.
            self.encoder.model.to("meta")
            self.encoder.clear_caches()
            self.decoder.model.to("meta")

    # -- before any work --

    def _render(self, request: GenerateRequest) -> tuple[Prompt, list[ImagePart], Plan | None]:
        pictures = [part for message in request.messages for part in message.images]
        plan = None
        if pictures:
            with _blaming(pictures):
                pictures = [self._brought(part, index) for index, part in enumerate(pictures)]
                plan = self.encoder.plan([part.source for part in pictures])
        tokens = [grid.tokens for grid in plan.grids] if plan else []
        prompt = self.prompts.render(
            request.messages,
            tokens,
            tools=request.tools,
            thinking=request.thinking,
            preserve_thinking=request.preserve_thinking,
        )
        return prompt, pictures, plan

    def _brought(self, part: ImagePart, index: int) -> ImagePart:
        """What an address stands for is brought once, so that what is counted is what is encoded."""
        if not (isinstance(part.source, str) and is_address(part.source)):
            return part
        return replace(part, source=fetch_bytes(part.source, self.encoder.fetch, self.encoder.limits, index))

    def _prepare(self, request: GenerateRequest) -> _Prepared:
        for message in request.messages:
            for part in message.images:
                if isinstance(part.source, tuple):
                    raise RequestError(f"{part.source} is the size of a picture, not a picture", param=part.param)
        prompt, pictures, plan = self._render(request)
        length, limit, wanted = len(prompt.ids), self.info.max_context, request.sampling.max_tokens
        if length >= limit:
            raise TooLargeError(
                f"the prompt has {length} tokens; the context of {self.info.model} is {limit}, answer included",
                param="messages",
            )
        if wanted is not None and length + wanted > limit:
            raise RequestError(
                f"a prompt of {length} tokens and max_tokens = {wanted} make {length + wanted}, "
                f"the context of {self.info.model} is {limit}",
                param="max_tokens",
            )
        _check_ids(_text_ids(prompt), self.decoder)
        return _Prepared(prompt, pictures, plan, limit - length if wanted is None else wanted)

    # -- the work, in the worker's thread --

    def _steps(self, request: GenerateRequest, prepared: _Prepared) -> Steps:
        features: list[torch.Tensor] = []
        if prepared.plan is not None:
            for batch in prepared.plan.batches:
                features += self._encode(prepared, prepared.plan, batch)
                yield None
        prepared.pictures.clear()
        cache = self.decoder.new_cache()
        length = len(prepared.prompt.ids)
        stop = 0
        while stop < length:
            start, stop = stop, _chunk_end(prepared.prompt.spans, stop, self._prefill, length)
            embeddings_SE = self._embed(prepared.prompt, features, start, stop)
            if stop < length:
                self.decoder.extend(embeddings_SE, cache)
                yield None
        features.clear()
        logits_V = self.decoder.next_logits(embeddings_SE, cache)
        yield from self._answer(request, prepared, logits_V, cache)

    def _encode(self, prepared: _Prepared, plan: Plan, batch: Batch) -> list[torch.Tensor]:
        pictures = prepared.pictures
        with _blaming(pictures):
            encoded = self.encoder.encode_batch([part.source for part in pictures], plan, batch)
        for index, features in zip(batch.indices, encoded, strict=True):
            found, expected = tuple(features.tensor.shape), (prepared.prompt.spans[index][1], self.decoder.width)
            if found != expected:
                raise MoonvitError(
                    f"picture {index}: the encoder gave {found}, the prompt has room for {expected}",
                    param=pictures[index].param or f"images[{index}]",
                )
        return [features.tensor for features in encoded]

    def _embed(self, prompt: Prompt, features: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Embeddings of positions ``start:stop``: features where pictures are, the table's rows elsewhere."""
        parts: list[torch.Tensor] = []
        done = start
        for (first, length), features_ME in zip(prompt.spans, features, strict=True):
            last = first + length
            if last <= done or first >= stop:
                continue
            if first > done:
                parts.append(self.decoder.embed(prompt.ids[done:first]))
                done = first
            parts.append(features_ME[done - first : min(stop, last) - first])
            done = min(stop, last)
        if done < stop:
            parts.append(self.decoder.embed(prompt.ids[done:stop]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _answer(self, request: GenerateRequest, prepared: _Prepared, logits_V: torch.Tensor, cache: Any) -> Steps:
        # A placeholder as the next token would be looked up as if it were text.
        sampler = Sampler(request.sampling, self._defaults, banned=(self.prompts.placeholder_id,))
        parser = self.prompts.parser(request.thinking)
        text = StopStrings(request.sampling.stop)
        reason: FinishReason = "length"
        for number in range(1, prepared.max_tokens + 1):
            token = sampler.pick(logits_V)
            delta = _as_delta(parser.feed(token), text)
            if token in self.prompts.stop_ids or text.hit:
                reason = "stop"
            if reason == "stop" or number == prepared.max_tokens:
                break
            yield delta
            logits_V = self.decoder.next_logits(self.decoder.embed((token,)), cache)
        events = [] if text.hit else parser.finish(truncated=reason == "length")
        rest = _as_delta(events, text, last=True)
        if reason == "stop" and parser.calls and not text.hit:
            reason = "tool_calls"
        yield Delta(
            content=(delta.content if delta else "") + (rest.content if rest else ""),
            reasoning=(delta.reasoning if delta else "") + (rest.reasoning if rest else ""),
            tool_calls=(delta.tool_calls if delta else ()) + (rest.tool_calls if rest else ()),
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=len(prepared.prompt.ids),
                completion_tokens=number,
                image_tokens=prepared.image_tokens,
                reasoning_tokens=parser.reasoning_tokens,
            ),
        )


def _chunk_end(spans: Iterable[tuple[int, int]], start: int, most: int, length: int) -> int:
    """Where the chunk of a prompt that begins at ``start`` ends: before a picture that it would cut, or behind it."""
    stop = min(start + most, length)
    for first, count in spans:
        if first < stop < first + count:
            return first if first > start else first + count
    return stop


def _as_delta(events: Iterable[Event], text: StopStrings, *, last: bool = False) -> Delta | None:
    """Events of the parser as one delta, cut at a stop string; None where there is nothing to say."""
    content, reasoning = "", ""
    calls: list[ToolCallDelta] = []
    for event in events:
        if text.hit:
            break
        if isinstance(event, Content):
            content += text.feed(event.text)
            continue
        content += text.flush()
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStart):
            calls.append(ToolCallDelta(event.index, event.id, event.name))
        elif isinstance(event, CallArguments):
            calls.append(ToolCallDelta(event.index, arguments=event.text))
    if last:
        content += text.flush()
    return Delta(content, reasoning, tuple(calls)) if content or reasoning or calls else None


def _at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ConfigError(f"{name} = {value}, must be at least 1", param=name)


def _check_ids(ids: Iterable[int], decoder: Decoder) -> None:
    """An id without an embedding would be an error of the device, and on a GPU the end of the process."""
    highest = max(ids)
    if highest >= decoder.vocabulary:
        raise ConfigError(
            f"the tokenizer uses id {highest}, the language model has ids up to {decoder.vocabulary - 1}",
            param="vocab_size",
        )


def _text_ids(prompt: Prompt) -> Iterator[int]:
    start = 0
    for first, length in prompt.spans:
        yield from prompt.ids[start:first]
        start = first + length
    yield from prompt.ids[start:]


@contextlib.contextmanager
def _blaming(pictures: Sequence[ImagePart]) -> Iterator[None]:
    """Let an error about picture n name the client's own part of the request."""
    try:
        yield
    except MoonvitError as error:
        counted = re.fullmatch(r"(?:images|grids)\[(\d+)\]", error.param or "")
        if counted:
            index = int(counted[1])
            error.param = pictures[index].param or f"images[{index}]"
        raise


def _model_name(path: str | Path, local: Path) -> str:
    if local.resolve() == default_model().resolve():
        return "moonvit-demo"
    return local.resolve().name if Path(path).exists() else str(path)
