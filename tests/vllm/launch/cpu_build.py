"""What the CPU build of vLLM 0.32 needs to answer right, for its own towers and for ours alike.

A vLLM plugin of its own: with this folder on ``PYTHONPATH``, the entry point of the ``dist-info`` beside this file
brings it into every process of an engine. None of it belongs to moonvit.
"""

from __future__ import annotations

import types
from typing import Any

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform
from vllm.triton_utils import dispatcher


def register() -> None:
    """Apply all of it, once."""
    if hasattr(dispatcher, "vars"):
        return
    _rotate_in_torch()
    _keep_prefix_caching()
    # In one process the scan for kernels meets a library of llvmlite whose vars() is no mapping.
    dispatcher.vars = lambda thing: found if isinstance(found := vars(thing), (dict, types.MappingProxyType)) else {}


def _rotate_in_torch() -> None:
    """The plain RoPE kernel reads queries of shape (tokens, heads, dim) with the strides of (tokens, heads * dim)."""
    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        whole = query.dim() == 3 and query.size(1) > 1
        return self.forward_native(positions, query, key) if whole else kernel(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def _keep_prefix_caching() -> None:
    """The platform switches prefix caching off where a model has latent attention and the CPU has no AMX."""
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, config: Any) -> None:
        wanted = config.cache_config.enable_prefix_caching
        check(cls, config)
        config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
