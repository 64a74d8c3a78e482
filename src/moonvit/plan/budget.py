"""A number of bytes as people write it, and the bound that it sets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from moonvit.errors import ConfigError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


@dataclass(frozen=True, init=False)
class Budget:
    """Bytes an encode may use beyond weights, inputs and outputs.

    Attributes:
        bytes: The number; None is "auto": whatever the request's largest image needs.
    """

    bytes: int | None

    def __init__(self, bytes: int | str = "auto") -> None:
        """Read a budget.

        Args:
            bytes: Bytes, text such as ``"256MiB"`` or ``"1.5GB"``, or ``"auto"``.

        Raises:
            ConfigError: It is none of these, or not at least one byte.
        """
        object.__setattr__(self, "bytes", None if _is_auto(bytes) else read_bytes(bytes, "budget", 1, ", or 'auto'"))

    def __str__(self) -> str:
        return "auto" if self.bytes is None else f"{self.bytes} bytes"


def _is_auto(value: int | str) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def read_bytes(value: int | str, name: str, least: int = 0, also: str = "") -> int:
    """Read a number of bytes as people write it.

    Args:
        value: A whole number, or text such as ``"256MiB"`` or ``"1.5GB"``.
        name: What it is, for the message.
        least: The smallest legal number.
        also: What else is legal there, for the message.

    Returns:
        Bytes.

    Raises:
        ConfigError: It is neither, or under ``least``.
    """
    number: int | None = None
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]*)", value.strip().lower())
        if match and match[2] in _UNITS:
            number = int(Fraction(match[1]) * _UNITS[match[2]])
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    if number is None or number < least:
        raise ConfigError(
            f"{name} = {str(value)[:40]!r}: give a number of bytes of at least {least}, text such as '256MiB'{also}",
            param=name,
        )
    return number
