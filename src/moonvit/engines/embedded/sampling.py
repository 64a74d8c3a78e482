"""The next token from logits, and the end of an answer at a stop string."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moonvit.engines import Sampling
from moonvit.errors import ConfigError, NonFiniteError, RequestError

MAX_STOPS = 16
"""Stop strings of one request."""
MAX_STOP_LENGTH = 1000
"""Characters of a stop string."""
_SEEDS = (-(2**63), 2**64 - 1)


@dataclass(frozen=True)
class Defaults:
    """How a model wants to be sampled where a request does not say.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus.
    """

    temperature: float = 0.0
    top_p: float = 1.0


def defaults_from_dict(generation: Mapping[str, Any]) -> Defaults:
    """Read ``generation_config.json``.

    Args:
        generation: Its content.

    Returns:
        Its temperature and top_p where it says ``do_sample``, else greedy.

    Raises:
        ConfigError: They are out of range.
    """
    if not generation.get("do_sample"):
        return Defaults()
    temperature, top_p = generation.get("temperature"), generation.get("top_p")
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ConfigError(f"generation_config.json: {name} = {value!r} is not a number", param=name)
    defaults = Defaults(1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p)
    try:
        check_sampling(Sampling(temperature=defaults.temperature, top_p=defaults.top_p))
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error.message}", param=error.param) from None
    return defaults


def check_sampling(sampling: Sampling) -> None:
    """Refuse what cannot be honoured.

    Args:
        sampling: What a request asks for.

    Raises:
        RequestError: A value is out of range; the message names it and the range.
    """
    temperature, top_p, seed = sampling.temperature, sampling.top_p, sampling.seed
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise RequestError(f"max_tokens = {sampling.max_tokens}, must be at least 1", param="max_tokens")
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise RequestError(f"temperature = {temperature}, must be 0 or more", param="temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise RequestError(f"top_p = {top_p}, must be above 0 and at most 1", param="top_p")
    if seed is not None and not _SEEDS[0] <= seed <= _SEEDS[1]:
        raise RequestError(f"seed = {seed}, allowed {_SEEDS[0]} to {_SEEDS[1]}", param="seed")
    if len(sampling.stop) > MAX_STOPS:
        raise RequestError(f"stop holds {len(sampling.stop)} strings, allowed {MAX_STOPS}", param="stop")
    if not all(sampling.stop):
        raise RequestError("stop holds an empty string, at which every answer would end at once", param="stop")
    longest = max(map(len, sampling.stop), default=0)
    if longest > MAX_STOP_LENGTH:
        raise RequestError(f"stop holds a string of {longest} characters, allowed {MAX_STOP_LENGTH}", param="stop")


class Sampler:
    """Picks the tokens of one answer.

    Args:
        sampling: What the request asks for, already checked.
        defaults: What the model wants where it does not say.
        banned: Ids that are never picked.

    Attributes:
        temperature: In force; 0 is greedy.
        top_p: In force.
    """

    def __init__(self, sampling: Sampling, defaults: Defaults, banned: Collection[int] = ()) -> None:
        self.temperature = defaults.temperature if sampling.temperature is None else sampling.temperature
        self.top_p = defaults.top_p if sampling.top_p is None else sampling.top_p
        self._banned = sorted(banned)
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)

    def pick(self, logits_V: torch.Tensor) -> int:
        """Pick the next token.

        Args:
            logits_V: float32 (V) on the CPU.

        Returns:
            Its id.

        Raises:
            NonFiniteError: A logit is NaN or infinite.
        """
        if not math.isfinite(float(logits_V.sum())) and not bool(logits_V.isfinite().all()):
            raise NonFiniteError(
                "the language model gave NaN or infinity; check the weights, or use a dtype with more range"
            )
        logits = logits_V.double()
        logits[[id for id in self._banned if id < len(logits)]] = -math.inf
        if self.temperature == 0:
            return int(logits.argmax())
        # Relative to the largest one nothing overflows, however small the temperature.
        weights = ((logits - logits.max()) / self.temperature).exp()
        weights, ids = weights.sort(descending=True, stable=True)
        below = weights.cumsum(0)
        nucleus = int((below - weights < self.top_p * below[-1]).sum())
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64) * below[nucleus - 1]
        return int(ids[min(int(torch.searchsorted(below[:nucleus], drawn, right=True)), nucleus - 1)])


class StopStrings:
    """Ends text before the first stop string, wherever the text was cut into pieces.

    The first one is the one that is complete first when the text comes letter by letter.

    Args:
        stops: The strings, none empty.

    Attributes:
        hit: One of them has come.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self.hit = False

    def feed(self, text: str) -> str:
        """Take a piece.

        Args:
            text: What comes next.

        Returns:
            What is certainly not part of a stop string; nothing after a hit.
        """
        if self.hit or not text:
            return ""
        text, self._held = self._held + text, ""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.hit = True
            return text[: min(found)[1]]
        for length in range(min(self._longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._held = text[-length:]
                return text[:-length]
        return text

    def flush(self) -> str:
        """Give what was held: no more text follows it."""
        held, self._held = self._held, ""
        return "" if self.hit else held
