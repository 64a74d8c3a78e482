"""The OpenAI request shapes: every field is honoured, or refused by name.

``parse_chat`` and ``parse_plan`` turn a JSON document into the plain data of ``moonvit.prompts.messages`` and
``moonvit.engines``. ``NEUTRAL`` lists the fields that are known but not honoured, with the values that ask for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from moonvit.engines import GenerateRequest, Sampling
from moonvit.errors import RequestError
from moonvit.preprocess import LONGEST
from moonvit.prompts.messages import ImagePart, Message, Part, Role, TextPart, ToolCall

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI fields this server does not honour -> values that change nothing; null is always one of them."""

MAX_ADDRESS = 8192
"""Characters of an http(s) picture address."""

_SHOWN = 60


def clip(text: str, limit: int = _SHOWN) -> str:
    """Shorten what a client sent before it is repeated in a message or a log line.

    Args:
        text: Any text.
        limit: Characters to keep.

    Returns:
        The text, or its beginning and its length.
    """
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


# ---- request shapes -------------------------------------------------------------------------------------------------


_MOST = 2048
"""Messages, parts of a message, images and sizes."""
_VALUES = 100_000
"""Values in a body, at any depth."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _ImageUrl(_Strict):
    url: str
    detail: Literal["auto", "low", "high"] | None = None


def _by_type(value: Any) -> str | None:
    """Union tag from the JSON type alone; tags start with ``~`` so that they can be cut out of error locations."""
    if isinstance(value, str):
        return "~string"
    if isinstance(value, list):
        return "~list"
    return "~object" if isinstance(value, (dict, BaseModel)) else None


_Picture = Annotated[
    Annotated[str, Tag("~string")] | Annotated[_ImageUrl, Tag("~object")],
    Discriminator(
        _by_type,
        custom_error_type="picture",
        custom_error_message="must be an address, or an object with 'url'",
    ),
]


class _Text(_Strict):
    type: Literal["text"]
    text: str


class _Image(_Strict):
    type: Literal["image_url"]
    image_url: _Picture


_Side = Annotated[int, Field(ge=1, le=LONGEST)]


class _Size(_Strict):
    width: _Side
    height: _Side


class _ImageSize(_Strict):
    type: Literal["image_size"]
    image_size: _Size


_UNSUPPORTED_PARTS = {
    "video_url": "video is not supported by this server",
    "video": "video is not supported by this server",
    "input_audio": "audio is not supported by this server",
    "file": "files are not supported by this server; send pictures as image_url",
    "image": "pictures are sent as image_url",
    "input_image": "pictures are sent as image_url",
    "input_text": "text is sent as a part of type text",
    "refusal": "refusals are not honoured; send the words as a part of type text",
}


def _part_tag(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"~{kind}" if kind in ("text", "image_url", "image_size") else None


_Part = Annotated[
    Annotated[_Text, Tag("~text")] | Annotated[_Image, Tag("~image_url")] | Annotated[_ImageSize, Tag("~image_size")],
    Discriminator(_part_tag, custom_error_type="part", custom_error_message="unknown part"),
]
_Content = Annotated[
    Annotated[str, Tag("~string")] | Annotated[list[_Part], Tag("~list"), Field(max_length=_MOST)],
    Discriminator(
        _by_type,
        custom_error_type="content",
        custom_error_message="must be a string or a list of parts",
    ),
]


class _Function(_Strict):
    name: str = Field(min_length=1, max_length=256)
    arguments: str


class _ToolCall(_Strict):
    id: str = Field(min_length=1, max_length=256)
    type: Literal["function"] = "function"
    function: _Function


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = Field(None, min_length=1, max_length=256)
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, min_length=1, max_length=256)
    # An answer of the OpenAI client, sent back as history, carries these as null or empty.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class _FunctionTool(_Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class _Tool(_Strict):
    type: Literal["function"]
    function: _FunctionTool


class _StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _TemplateSettings(_Strict):
    thinking: bool | None = None
    preserve_thinking: bool | None = None


class _Prompt(_Strict):
    model: str | None = None
    tools: list[_Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto"] | None = None
    reasoning_effort: Literal["none"] | None = None
    chat_template_kwargs: _TemplateSettings | None = None


class _Chat(_Prompt):
    messages: list[_Message] = Field(min_length=1, max_length=_MOST)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: (
        Annotated[
            Annotated[str, Tag("~string"), Field(min_length=1, max_length=1000)]
            | Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Tag("~list"), Field(max_length=4)],
            Discriminator(
                _by_type,
                custom_error_type="stop",
                custom_error_message="must be a string or a list of at most 4 strings",
            ),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=256)


class _Plan(_Prompt):
    messages: list[_Message] | None = Field(None, min_length=1, max_length=_MOST)
    images: list[_Picture] | None = Field(None, min_length=1, max_length=_MOST)
    sizes: list[Annotated[list[_Side], Field(min_length=2, max_length=2)]] | None = Field(
        None, min_length=1, max_length=_MOST
    )


# ---- from JSON to plain data ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatCall:
    """A chat request, checked.

    Attributes:
        request: What the engine is asked; pictures still are addresses.
        stream: Send the answer piece by piece.
        include_usage: End the stream with a chunk that holds the usage.
        user: Who asks, for the log: ``user`` or ``safety_identifier``.
    """

    request: GenerateRequest
    stream: bool
    include_usage: bool
    user: str


_M = TypeVar("_M", bound=BaseModel)


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("~"):
            path += f".{step}" if path else step
    return path


def _refusal(error: ValidationError) -> RequestError:
    problems = error.errors(include_url=False, include_context=False)
    # A key the server does not know is the likeliest cause of everything else that is wrong.
    first = next((item for item in problems if item["type"] == "extra_forbidden"), problems[0])
    path = _path(first["loc"])
    value = first["input"]
    shown = clip(repr(value)) if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__
    if first["type"] == "extra_forbidden":
        message = f"unknown field {clip(path)!r}: this server does not honour it"
    elif first["type"] == "missing":
        message = f"{path} is required"
    elif first["type"] == "part":
        kind = value.get("type") if isinstance(value, dict) else None
        message = f"{path}: " + _UNSUPPORTED_PARTS.get(
            str(kind), f"a part of type {clip(repr(kind))} is not supported; use 'text' or 'image_url'"
        )
        path = f"{path}.type" if isinstance(value, dict) else path
    elif path.endswith("reasoning_effort"):
        message = f"{path} = {shown}: the model has no levels of effort; use 'none', or chat_template_kwargs.thinking"
    elif path.endswith("tool_choice"):
        message = f"{path} = {shown}: a call cannot be forced here; use 'auto' or 'none'"
    else:
        message = f"{path} = {shown}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return RequestError(message, param=clip(path, 200) or None)


def _count_values(document: Any) -> None:
    """Refuse what would take long to check: two bytes of JSON are a value, and every wrong one a complaint."""
    left, rest = _VALUES, [document]
    while rest:
        value = rest.pop()
        if isinstance(value, (dict, list)):
            left -= len(value)
            if left < 0:
                raise RequestError(f"the body holds more than {_VALUES} values")
            rest.extend(value.values() if isinstance(value, dict) else value)


def _validate(shape: type[_M], document: Any) -> _M:
    if not isinstance(document, dict):
        raise RequestError(f"the body must be a JSON object, got {type(document).__name__}")
    _count_values(document)
    try:
        return shape.model_validate(document)
    except ValidationError as error:
        raise _refusal(error) from None


def _without_neutral(document: Any) -> Any:
    if not isinstance(document, dict):
        return document
    for name, allowed in NEUTRAL.items():
        value = document.get(name)
        same = any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed)
        if value is not None and not same:
            listed = " or ".join(["null", *(repr(item) for item in allowed)])
            raise RequestError(f"{name} = {clip(repr(value))} is not supported; supported: {listed}", param=name)
    return {name: value for name, value in document.items() if name not in NEUTRAL}


def _address(picture: str | _ImageUrl, path: str) -> str:
    url = picture if isinstance(picture, str) else picture.url
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return url
    if not scheme.startswith(("http://", "https://")):
        raise RequestError(f"{path}: a picture address must be data:, http:// or https://", param=path)
    if len(url) > MAX_ADDRESS:
        raise RequestError(f"{path}: the address has {len(url)} characters, allowed {MAX_ADDRESS}", param=path)
    return url


def _parts(content: str | list[Any] | None, path: str, sizes: bool) -> tuple[Part, ...]:
    if content is None or isinstance(content, str):
        return (TextPart(content),) if content else ()
    parts: list[Part] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if isinstance(part, _Text):
            if part.text:
                parts.append(TextPart(part.text))
        elif isinstance(part, _Image):
            parts.append(ImagePart(_address(part.image_url, f"{where}.image_url"), where))
        elif sizes:
            parts.append(ImagePart((part.image_size.width, part.image_size.height), where))
        else:
            raise RequestError(
                f"{where}: a part of type 'image_size' is for /v1/vision/plan; an answer needs the picture itself",
                param=f"{where}.type",
            )
    return tuple(parts)


def _messages(messages: Sequence[_Message], max_images: int, sizes: bool) -> tuple[Message, ...]:
    result = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        only: tuple[tuple[str, Any, str], ...] = (
            ("reasoning_content", message.reasoning_content, "assistant"),
            ("tool_calls", message.tool_calls, "assistant"),
            ("tool_call_id", message.tool_call_id, "tool"),
        )
        for name, value, role in only:
            if value is not None and message.role != role:
                raise RequestError(
                    f"{path}.{name} belongs to a {role} message, not {message.role}", param=f"{path}.{name}"
                )
        if message.role == "tool" and message.tool_call_id is None:
            raise RequestError(f"{path}.tool_call_id is required in a tool message", param=f"{path}.tool_call_id")
        parts = _parts(message.content, f"{path}.content", sizes)
        if not parts and message.role != "assistant":  # an answer may have been cut before it said anything
            raise RequestError(f"{path} is empty: it holds neither text nor a picture", param=f"{path}.content")
        role_name: Role = "system" if message.role == "developer" else message.role
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()
        )
        result.append(
            Message(
                role=role_name,
                parts=parts,
                reasoning=message.reasoning_content,
                tool_calls=calls,
                tool_call_id=message.tool_call_id,
                name=message.name,
            )
        )
    count = sum(len(message.images) for message in result)
    if count > max_images:
        raise RequestError(
            f"the messages hold {count} pictures, history included; allowed {max_images}", param="messages"
        )
    return tuple(result)


def _thinking(prompt: _Prompt) -> bool | None:
    asked = prompt.chat_template_kwargs.thinking if prompt.chat_template_kwargs else None
    if prompt.reasoning_effort != "none":
        return asked
    if asked:
        raise RequestError(
            "reasoning_effort 'none' contradicts chat_template_kwargs.thinking true", param="reasoning_effort"
        )
    return False


def _preserve_thinking(prompt: _Prompt) -> bool | None:
    return prompt.chat_template_kwargs.preserve_thinking if prompt.chat_template_kwargs else None


def _tools(prompt: _Prompt) -> tuple[dict[str, Any], ...]:
    if prompt.tool_choice == "none":
        return ()
    return tuple(tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}}) for tool in prompt.tools or ())


def parse_chat(document: Any, *, max_images: int, id: str = "") -> ChatCall:
    """Read the body of ``/v1/chat/completions``.

    Args:
        document: The decoded JSON.
        max_images: Pictures allowed in all messages together.
        id: Name of the request in logs.

    Returns:
        The request. Whether its ``model`` is served is for the caller to say.

    Raises:
        RequestError: A field is unknown, not honoured, of the wrong kind or out of range; ``param`` is its path.
    """
    chat = _validate(_Chat, _without_neutral(document))
    if chat.stream_options is not None and not chat.stream:
        raise RequestError("stream_options is only allowed when stream is true", param="stream_options")
    limits = {value for value in (chat.max_tokens, chat.max_completion_tokens) if value is not None}
    if len(limits) > 1:
        raise RequestError(
            f"max_tokens = {chat.max_tokens} and max_completion_tokens = {chat.max_completion_tokens} disagree",
            param="max_tokens",
        )
    if chat.user is not None and chat.safety_identifier is not None and chat.user != chat.safety_identifier:
        raise RequestError("user and safety_identifier disagree", param="user")
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    request = GenerateRequest(
        messages=_messages(chat.messages, max_images, sizes=False),
        sampling=Sampling(
            max_tokens=next(iter(limits), None),
            temperature=chat.temperature,
            top_p=chat.top_p,
            seed=chat.seed,
            stop=stop,
        ),
        tools=_tools(chat),
        thinking=_thinking(chat),
        preserve_thinking=_preserve_thinking(chat),
        id=id,
    )
    usage = bool(chat.stream_options and chat.stream_options.include_usage)
    return ChatCall(request, bool(chat.stream), usage, chat.user or chat.safety_identifier or "")


def parse_plan(document: Any, *, max_images: int, id: str = "") -> GenerateRequest:
    """Read the body of ``/v1/vision/plan``.

    Args:
        document: The decoded JSON: the ``messages`` of a chat request, or ``images`` (addresses), or ``sizes``
            (``[width, height]`` pairs). In messages, a part ``{"type": "image_size", "image_size": {"width",
            "height"}}`` stands for a picture of which only the size is known.
        max_images: Pictures allowed.
        id: Name of the request in logs.

    Returns:
        The request to count. A picture is an address or ``(width, height)``.

    Raises:
        RequestError: As for ``parse_chat``, or not exactly one of the three is given.
    """
    plan = _validate(_Plan, document)
    given = [name for name in ("messages", "images", "sizes") if getattr(plan, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise RequestError(
            f"give exactly one of messages, images and sizes; found {found}", param=(given or ["messages"])[0]
        )
    if plan.messages is not None:
        messages = _messages(plan.messages, max_images, sizes=True)
    else:
        parts: tuple[ImagePart, ...]
        if plan.images is not None:
            parts = tuple(
                ImagePart(_address(item, f"images[{i}]"), f"images[{i}]") for i, item in enumerate(plan.images)
            )
        else:
            parts = tuple(ImagePart((size[0], size[1]), f"sizes[{i}]") for i, size in enumerate(plan.sizes or ()))
        if len(parts) > max_images:
            raise RequestError(f"{given[0]} holds {len(parts)} pictures; allowed {max_images}", param=given[0])
        messages = (Message("user", parts),)
    return GenerateRequest(
        messages=messages,
        tools=_tools(plan),
        thinking=_thinking(plan),
        preserve_thinking=_preserve_thinking(plan),
        id=id,
    )
