"""Text weights of Kimi-VL and Kimi-K2.5, from the names of the official checkpoints into transformers' modules.

transformers keeps all experts of a layer in two tensors; the checkpoints hold three matrices for each expert. So every
official name is given a place, a view of one parameter, and values are copied into it one tensor at a time: no second
copy of the model ever exists. Loading is strict and looks at all headers before it reads a value.

Routed experts of K2.5 are INT4: ``weight_packed`` holds eight 4-bit values in an int32, the first in the lowest bits,
each 8 too large; ``weight_scale`` has one factor for each group of columns; ``weight_shape`` the size. They are
unpacked one matrix at a time into the dtype of the model. Which tensors are packed is seen by their names, not by the
configuration.

Names: the released checkpoints, and the two spellings of transformers when it saves such a model again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moonvit.checkpoint import Header, is_vision, open_shard, read_headers, refuse, shards_with
from moonvit.errors import CheckpointError

Places = dict[str, torch.Tensor]
"""Official name -> the view of a parameter that its values go to."""

PACKED, SCALE, SHAPE = "_packed", "_scale", "_shape"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")
_NIBBLES = 8


def official_name(name: str) -> str:
    """The official spelling of a text tensor's name.

    Args:
        name: As a file has it.

    Returns:
        ``language_model.model....`` or ``language_model.lm_head.weight``; other names as they are.
    """
    for start, official in (
        ("model.language_model.lm_head.", "language_model.lm_head."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(start):
            name = official + name.removeprefix(start)
            break
    # transformers 5.19 renames the layers of the text model too when it gives the tower its official names back.
    return re.sub(r"^language_model\.model\.blocks\.", "language_model.model.layers.", name)


def places(model: nn.Module) -> Places:
    """Where each tensor of a checkpoint goes.

    Args:
        model: transformers' ``DeepseekV3ForCausalLM``; parameters may be on the meta device.

    Returns:
        Official name -> view. Tensors of the rotary embedding are not among them: they are computed.
    """
    found: Places = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        official = f"language_model.{name}"
        # A view of a parameter that wants gradients must not be written to.
        tensor = tensor.detach()
        if name.endswith(".experts.gate_up_proj"):
            stem = official.removesuffix("gate_up_proj")
            for expert, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                found[f"{stem}{expert}.gate_proj.weight"] = gate
                found[f"{stem}{expert}.up_proj.weight"] = up
        elif name.endswith(".experts.down_proj"):
            stem = official.removesuffix("down_proj")
            for expert, matrix in enumerate(tensor):
                found[f"{stem}{expert}.down_proj.weight"] = matrix
        else:
            found[official] = tensor
    return found


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Unpack one matrix.

    Args:
        packed: int32 (rows, columns / 8), rounded up.
        scale: Floating (rows, groups); a group is an equal share of the columns.
        shape: Rows and columns.

    Returns:
        float32 (rows, columns): the 4-bit value minus 8, times its group's factor.

    Raises:
        CheckpointError: The three do not fit each other.
    """
    rows, columns = shape
    groups = scale.shape[-1] if scale.ndim == 2 else 0
    if (
        packed.dtype is not torch.int32
        or tuple(packed.shape) != (rows, -(-columns // _NIBBLES))
        or tuple(scale.shape) != (rows, groups)
        or not groups
        or columns % groups
    ):
        raise CheckpointError(
            f"INT4 values {packed.dtype} {list(packed.shape)} with scales {list(scale.shape)} are not a matrix of "
            f"{rows} x {columns}"
        )
    shifts = torch.arange(0, 4 * _NIBBLES, 4, dtype=torch.int32)
    values = ((packed[..., None] >> shifts) & 15).flatten(1)[:, :columns].float() - 8
    return values.view(rows, groups, -1).mul_(scale.float()[..., None]).view(rows, columns)


@dataclass(frozen=True)
class TextFiles:
    """Where the values of a decoder are.

    Attributes:
        sources: Official name -> the one tensor it is read from, or its three packed parts.
        files: Name of a tensor -> the file it is in.
    """

    sources: dict[str, tuple[str, ...]]
    files: dict[str, Path]


def find_text(model: nn.Module, path: str | Path, *, tied: bool, extra_layers: int = 0) -> TextFiles:
    """Hold a decoder against the headers of a checkpoint, before any value is read or any memory taken.

    Args:
        model: transformers' ``DeepseekV3ForCausalLM``; its parameters may be on the meta device.
        path: Directory with ``model.safetensors.index.json`` or ``model.safetensors``.
        tied: The output matrix is the embedding, so it need not be in the files.
        extra_layers: Layers behind the last one that the files may hold and the model has no use for (multi-token
            prediction).

    Returns:
        What ``load_text`` reads.

    Raises:
        CheckpointError: With every missing, unexpected, misshapen, doubled and wrongly quantised tensor, by name.
    """
    targets = places(model)
    layers = 1 + max((int(match[1]) for match in map(_LAYER.match, targets) if match), default=-1)

    def wanted(name: str) -> bool:
        if is_vision(name) or name.endswith(".rotary_emb.inv_freq"):
            return False
        layer = _LAYER.match(official_name(name))
        return layer is None or not layers <= int(layer[1]) < layers + extra_layers

    shards = shards_with(path, wanted)
    headers = {header.name: header for file, names in shards.items() for header in read_headers(file, names)}
    optional = {"language_model.lm_head.weight"} if tied else set()
    sources = _match(targets, headers, optional, str(path))
    return TextFiles(sources, {name: file for file, names in shards.items() for name in names})


def load_text(model: nn.Module, found: TextFiles) -> None:
    """Fill a decoder.

    Args:
        model: The same, with storage, on any device and in any floating dtype.
        found: What ``find_text`` found.

    Raises:
        CheckpointError: A file changed or is damaged.
    """
    targets = places(model)
    for names in _by_file(found.sources, found.files):
        with open_shard(found.files[names[0][1][0]]) as shard, torch.no_grad():
            for target, parts in names:
                _fill(targets[target], parts, shard, found.files, target)


def _match(targets: Places, headers: Mapping[str, Header], optional: set[str], path: str) -> dict[str, tuple[str, ...]]:
    """Official name -> the one tensor it is read from, or its three packed parts."""
    given: dict[str, dict[str, str]] = {}
    unexpected, quantised, misshapen, doubled = [], [], [], []
    for name, header in headers.items():
        official = official_name(name)
        suffix = next((end for end in (PACKED, SCALE, SHAPE) if official.endswith(f".weight{end}")), "")
        stem = official.removesuffix(suffix)
        if stem not in targets:
            unexpected.append(name)
            continue
        parts = given.setdefault(stem, {})
        if suffix in parts:
            doubled.append(f"{parts[suffix]} and {name}")
        parts[suffix] = name
        if not suffix and header.dtype not in _FLOATS:
            quantised.append(f"{name} ({header.dtype})")
        elif not suffix and header.shape != tuple(targets[stem].shape):
            misshapen.append(f"{name} is {list(header.shape)}, expected {list(targets[stem].shape)}")
        elif suffix == PACKED and header.dtype != "I32":
            quantised.append(f"{name} ({header.dtype})")
    missing: list[str] = []
    sources: dict[str, tuple[str, ...]] = {}
    for official in targets:
        parts = given.get(official, {})
        if "" in parts and len(parts) == 1:
            sources[official] = (parts[""],)
        elif set(parts) == {PACKED, SCALE, SHAPE}:
            sources[official] = (parts[PACKED], parts[SCALE], parts[SHAPE])
        elif "" in parts:
            quantised += sorted(name for suffix, name in parts.items() if suffix)
        elif parts:
            missing += [f"{official}{suffix}" for suffix in (PACKED, SCALE, SHAPE) if suffix not in parts]
        elif official not in optional:
            missing.append(official)
    refuse(
        f"{path} does not fit its text_config",
        {
            "missing": missing,
            "unexpected": unexpected,
            "of a wrong shape": misshapen,
            "given twice": doubled,
            "quantised otherwise than in packed INT4": quantised,
        },
    )
    return sources


def _by_file(
    sources: Mapping[str, tuple[str, ...]], files: Mapping[str, Path]
) -> Iterator[list[tuple[str, tuple[str, ...]]]]:
    """The work, sorted so that each file is opened once; parts of a matrix in other files are fetched from there."""
    grouped: dict[Path, list[tuple[str, tuple[str, ...]]]] = {}
    for target, parts in sources.items():
        grouped.setdefault(files[parts[0]], []).append((target, parts))
    yield from grouped.values()


def _fill(target: torch.Tensor, parts: tuple[str, ...], shard: Any, files: Mapping[str, Path], name: str) -> None:
    if len(parts) == 1:
        target.copy_(shard.get_tensor(parts[0]))
        return
    packed, scale, shape = (_tensor(part, files[parts[0]], shard, files) for part in parts)
    if tuple(shape.tolist()) != tuple(target.shape):
        raise CheckpointError(f"{parts[2]} says {shape.tolist()}, expected {list(target.shape)}")
    try:
        target.copy_(unpack_int4(packed, scale, (target.shape[0], target.shape[1])))
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error.message}") from None


def _tensor(name: str, home: Path, shard: Any, files: Mapping[str, Path]) -> torch.Tensor:
    if files[name] == home:
        return shard.get_tensor(name)  # type: ignore[no-any-return]
    with open_shard(files[name]) as other:
        return other.get_tensor(name)  # type: ignore[no-any-return]
