"""What vision tensors are called, here and elsewhere, and what may stand beside a packed one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch

from moonvit.families import PREFIXES, VisionConfig
from moonvit.model import VisionModel
from moonvit.quantised import Linear

Spelling = Literal["official", "transformers", "runtime"]


_BLOCK, _LAYER = "vision_tower.encoder.blocks.{i}.", "vision_tower.layers.{i}."
_SPELLINGS: tuple[tuple[str, Spelling, tuple[str, ...]], ...] = (
    (
        "vision_tower.patch_embed.pos_emb.weight",
        "transformers",
        ("vision_tower.patch_embed.pos_emb.position_embeddings",),
    ),
    (f"{_BLOCK}norm0", "transformers", (f"{_LAYER}norm1",)),
    (f"{_BLOCK}norm1", "transformers", (f"{_LAYER}norm2",)),
    (f"{_BLOCK}mlp.fc0", "transformers", (f"{_LAYER}mlp.fc1",)),
    (f"{_BLOCK}mlp.fc1", "transformers", (f"{_LAYER}mlp.fc2",)),
    (f"{_BLOCK}wo", "transformers", (f"{_LAYER}attn.proj",)),
    (f"{_BLOCK}wqkv", "transformers", (f"{_LAYER}attn.q_proj", f"{_LAYER}attn.k_proj", f"{_LAYER}attn.v_proj")),
    ("vision_tower.encoder.final_layernorm", "transformers", ("vision_tower.final_layernorm",)),
    ("mm_projector.proj.0", "transformers", ("mm_projector.in_proj",)),
    ("mm_projector.proj.2", "transformers", ("mm_projector.out_proj",)),
    (f"{_BLOCK}wqkv", "runtime", (f"{_BLOCK}attn.qkv_proj",)),
    (f"{_BLOCK}wo", "runtime", (f"{_BLOCK}attn.proj",)),
    ("mm_projector.proj.0", "runtime", ("mm_projector.linear_1",)),
    ("mm_projector.proj.2", "runtime", ("mm_projector.linear_2",)),
)
"""Official name, whose spelling, and the name or names there; ``{i}`` is the block number."""
_READ_ONLY = {"vision_tower.patch_embed.proj": "vision_tower.encoder.patch_embed.proj"}
"""Spellings that are read and never written: transformers 5.19 saves this one when it restores official names."""


FLOATS = {"F64", "F32", "F16", "BF16"}
KINDS = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
"""Packed weights that are read."""
DTYPE_NAMES = {
    **{dtype: name for name, dtype in KINDS.items()},
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e8m0fnu: "F8_E8M0", torch.int32: "I32", torch.int64: "I64"},
}
WORDS, SHAPE = "weight_packed", "weight_shape"
"""int8 values plus 128, four in an int32, the first in its lowest bits; and rows and columns of the matrix."""


class Piece(NamedTuple):
    """Where a tensor of a file goes.

    Attributes:
        name: Official name of the parameter.
        part: 0, 1 or 2 where the tensor is the q, k or v third of a fused parameter; None where it is all of it.
    """

    name: str
    part: int | None = None


class Header(NamedTuple):
    """What a file says of a tensor before its values are read."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@lru_cache(4)
def expected_shapes(config: VisionConfig) -> Mapping[str, tuple[int, ...]]:
    """Official name and shape of every vision tensor of a model.

    Args:
        config: Which model.

    Returns:
        As a checkpoint of this model holds them.
    """
    tensors = _outline(config).state_dict()
    return MappingProxyType({name: tuple(tensor.shape) for name, tensor in tensors.items()})


@lru_cache(4)
def packable(config: VisionConfig) -> Mapping[str, tuple[int, ...]]:
    """Official name and shape of the weights that a file may hold packed: those of linear layers.

    Args:
        config: Which model.

    Returns:
        Of every block and of the projector; not the patch embedding, whose name says convolution.
    """
    linear = ((name, layer) for name, layer in _outline(config).named_modules() if isinstance(layer, Linear))
    return MappingProxyType({f"{name}.weight": tuple(layer.weight.shape) for name, layer in linear})


def _outline(config: VisionConfig) -> VisionModel:
    with torch.device("meta"):
        return VisionModel(config)


def known_names(config: VisionConfig) -> dict[str, Piece]:
    """Every name a vision tensor of this model may have, without a leading ``model.``.

    Args:
        config: Which model.

    Returns:
        Name in a file -> where it goes.
    """
    names: dict[str, Piece] = {}
    for official in expected_shapes(config):
        names[official] = Piece(official)
        for _, pieces in spelled(official):
            for part, name in enumerate(pieces):
                names[name] = Piece(official, part if len(pieces) > 1 else None)
        for stem, other in _READ_ONLY.items():
            if official.startswith(f"{stem}."):
                names[official.replace(stem, other)] = Piece(official)
    return names


def role_of(name: str, names: Mapping[str, Piece]) -> tuple[Piece | None, str]:
    """What a tensor is to a model, by its name.

    Args:
        name: As it stands in the file.
        names: Those that ``known_names`` gives.

    Returns:
        The parameter that it is, and ""; or the weight it stands beside (None where there is none), and the last part
        of its name.
    """
    name = name.removeprefix("model.")
    if name in names:
        return names[name], ""
    stem, _, last = name.rpartition(".")
    return names.get(f"{stem}.weight"), last


def kind_of(
    header: Header, piece: Piece | None, last: str, layers: Mapping[str, tuple[int, ...]]
) -> torch.dtype | None:
    """What kind of packed values a tensor holds.

    Args:
        header: What its file says of it.
        piece: The parameter it is or stands beside, as ``role_of`` says.
        last: What it is there, as ``role_of`` says.
        layers: What ``packable`` gives.

    Returns:
        ``torch.float8_e4m3fn`` or ``torch.int8`` where it is the weight of a linear layer and holds such; or None.
    """
    if piece is None or piece.name not in layers:
        return None
    if last == WORDS:
        rows, columns = part_shape(layers[piece.name], piece)
        return torch.int8 if (header.dtype, header.shape) == ("I32", (rows, -(-columns // 4))) else None
    return None if last else KINDS.get(header.dtype)


def part_shape(shape: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """Shape of what a file holds of a parameter.

    Args:
        shape: Of the whole parameter.
        piece: Which part of it.

    Returns:
        A third of the rows where it is one.
    """
    return shape if piece.part is None else (shape[0] // 3, *shape[1:])


def spelled(official: str) -> Iterator[tuple[Spelling, tuple[str, ...]]]:
    """The other spellings of a name.

    Args:
        official: Of a parameter, or of what stands beside a weight.

    Yields:
        Whose spelling, and the name or names there.
    """
    number = re.search(r"\.blocks\.(\d+)\.", official)
    for template, spelling, others in _SPELLINGS:
        stem = template.replace("{i}", number[1]) if number else template
        if official == stem or official.startswith(f"{stem}."):
            tail = official[len(stem) :]
            yield spelling, tuple(other.replace("{i}", number[1] if number else "") + tail for other in others)


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to a tower or a projector, by its name.

    Args:
        name: As it stands in the file.

    Returns:
        True for vision, False for the language model.
    """
    prefixes = {prefix for pair in PREFIXES.values() for prefix in pair}
    return name.removeprefix("model.").startswith(tuple(prefixes))


def swap_halves(tensor: torch.Tensor, heads: int, *, to_pairs: bool) -> torch.Tensor:
    """Rows of q or k from rotary halves to consecutive pairs, or back.

    Within a head of width H, row ``c * H / 2 + i`` of the halves is row ``2 * i + c`` of the pairs.

    Args:
        tensor: Rows of all heads, with any shape behind.
        heads: Their number.
        to_pairs: The way to go.

    Returns:
        The same rows in the other order.
    """
    inner = (2, -1) if to_pairs else (-1, 2)
    return torch.unflatten(tensor, 0, (heads, *inner)).transpose(1, 2).flatten(0, 2)
