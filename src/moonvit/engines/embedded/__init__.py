"""The embedded engine: our vision encoder and transformers' DeepSeek-V3 decoder in one process."""

from __future__ import annotations

from moonvit.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
