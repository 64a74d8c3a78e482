"""Tool declarations as Kimi-K2.5 reads them: TypeScript types, or compact JSON where a schema has no such form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def declare(tools: Sequence[Mapping[str, Any]]) -> str:
    """Write the declaration of some tools."""
    return json.dumps(list(tools), ensure_ascii=False, separators=(",", ":"))
