"""Weights packed as other programs pack them, and the numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moonvit.checkpoint import load_tensors
from moonvit.families import VisionConfig
from moonvit.model import VisionModel
from tests.parity.cases import tiny

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fp8_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale."""
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def fp8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A bfloat16 scale for each row."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return (weight / scale.float()).to(torch.float8_e4m3fn), scale


def fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each 128 x 128."""
    rows, columns = weight.shape
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    return (weight * 100).to(torch.float8_e4m3fn), scale / 100


def int8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale for each row."""
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


WAYS: dict[str, Pack] = {way.__name__: way for way in (fp8_tensor, fp8_channel, fp8_block, int8_channel)}


def pack(state: Tensors, names: Any, way: str, scale_name: str = "weight_scale") -> Tensors:
    """A state dict with some weights packed."""
    packed = dict(state)
    ways = list(WAYS.values()) if way == "mixed" else [WAYS[way]]
    for index, name in enumerate(names):
        packed[name], scale = ways[index % len(ways)](state[name])
        packed[name.removesuffix("weight") + scale_name] = scale
    return packed


def plain(packed: Tensors) -> Tensors:
    """The same with numbers in float32, by their definition."""
    numbers = {name: tensor for name, tensor in packed.items() if "_scale" not in name}
    for name, tensor in packed.items():
        if "_scale" in name:
            weight = name.rpartition(".")[0] + ".weight"
            rows, columns = packed[weight].shape
            scale = tensor.float().reshape(-1, 1) if tensor.ndim < 2 else tensor.float()
            if scale.shape[0] not in (1, rows):
                scale = scale.repeat_interleave(128, 0)[:rows]
            if scale.shape[1] != 1:
                scale = scale.repeat_interleave(128, 1)[:, :columns]
            numbers[weight] = packed[weight].float() * scale
    return numbers


def state_of(model: VisionModel) -> Tensors:
    """A copy of the weights of a model."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def model_of(config: VisionConfig, state: Tensors) -> VisionModel:
    """A model with these weights."""
    model = VisionModel.empty(config)
    load_tensors(model, state.items())
    return model


def in_words(state: Tensors) -> Tensors:
    """int8 weights as compressed-tensors writes them with 8 bits: plus 128, four in an int32, and their shape."""
    written = dict(state)
    for name, tensor in state.items():
        if tensor.dtype == torch.int8:
            rows, columns = tensor.shape
            values = torch.zeros(rows, -(-columns // 4) * 4, dtype=torch.int64)
            values[:, :columns] = tensor.long() + 128
            words = (values.view(rows, -1, 4) << torch.tensor([0, 8, 16, 24])).sum(2)
            del written[name]
            written[f"{name}_packed"] = words.to(torch.int32)
            written[f"{name}_shape"] = torch.tensor([rows, columns])
    return written


def wide_config(name: str) -> VisionConfig:
    """Odd widths, wider than a block of scales."""
    widths = {"hidden_size": 144, "num_heads": 4, "intermediate_size": 300, "text_hidden_size": 200}
    return tiny(name, num_layers=2, **widths, **({"qkv_size": 192} if name == "kimi-k3" else {}))
