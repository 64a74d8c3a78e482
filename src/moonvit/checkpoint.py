"""Vision weights from and to safetensors, under the names of every place they are found in.

The table ``_SPELLINGS`` says what each tensor is called elsewhere; everything here reads it, in one direction or the
other. Loading is strict: headers are compared with the model before a single value is read, and all differences are
reported together. Only shards that hold vision are opened, and values go straight into the model, one tensor at a time.

A linear layer may be packed, each for itself: ``X.weight`` in FP8 (e4m3fn) or int8 beside ``X.weight_scale`` or
``X.weight_scale_inv``, one number, one for each row, or one for each block of 128 x 128 or of 128 in a row. Its bytes
stay as they are. Where four int8 values stand in an int32, as in ``X.weight_packed`` of compressed-tensors with 8
bits, they become ``X.weight``. Scales of activations beside them are passed over, as those are not packed here.

Sources of the names: the official checkpoints (``official``); transformers 5 (``transformers``), whose towers keep q, k
and v apart and their rotary pairs split in halves; the serving engines' run-time names (``runtime``). A leading
``model.`` is accepted before all of them, and one file may mix them: transformers' own ``save_pretrained`` does.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moonvit.errors import CheckpointError, InvalidInputError, MissingDependencyError
from moonvit.families import ALIASES, FAMILIES, PREFIXES, VisionConfig, config_dicts, config_from_dict, read_json
from moonvit.model import VisionModel
from moonvit.quantised import SCALE_NAMES, Linear, PackedLinear, row_scales, scale_shapes

Spelling = Literal["official", "transformers", "runtime"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"

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

_FLOATS = {"F64", "F32", "F16", "BF16"}
_KINDS = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
"""Packed weights that are read."""
_SCALES = {*_FLOATS, "F8_E8M0"}
"""Scales that are read."""
_DTYPE_NAMES = {
    **{dtype: name for name, dtype in _KINDS.items()},
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e8m0fnu: "F8_E8M0", torch.int32: "I32", torch.int64: "I64"},
}
_WORDS, _SHAPE = "weight_packed", "weight_shape"
"""int8 values plus 128, four in an int32, the first in its lowest bits; and rows and columns of the matrix."""
_PASSED_OVER = ("input_scale", "input_zero_point", "activation_scale", "output_scale")
"""What is said of activations."""
_PACKED = re.compile(
    r"(_packed|_scale|_scale_inv|_scale_2|_zero_point|_shape|_g_idx|\.qweight|\.qzeros|\.scales|\.g_idx)$"
)
_LISTED = 20


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


# ---- names ----------------------------------------------------------------------------------------------------------


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


def packed_layers(config: VisionConfig, path: str | Path) -> frozenset[str]:
    """Which layers of a local checkpoint are packed, as ``make_plan`` takes them, by its headers alone.

    Args:
        config: The model.
        path: Checkpoint directory or safetensors file; it may lack its weights.

    Returns:
        Their names; none where there are no weights.

    Raises:
        CheckpointError: Weights are there, but the index or a file is broken, or a file the index names is not there.
    """
    path = Path(path)
    if path.is_dir() and not (path / INDEX).exists() and not (path / SINGLE).exists():
        return frozenset()
    names, layers = known_names(config), packable(config)
    packed: dict[str, torch.dtype] = {}
    for shard, held in vision_shards(path).items():
        for header in read_headers(shard, held):
            piece, last = _role(header.name, names)
            kind = _kind(header, piece, last, layers)
            if piece is not None and kind is not None:
                packed[piece.name.removesuffix(".weight")] = kind
    return VisionModel.empty(config, device="meta", packed=packed).packed


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
        for _, pieces in _spelled(official):
            for part, name in enumerate(pieces):
                names[name] = Piece(official, part if len(pieces) > 1 else None)
        for stem, other in _READ_ONLY.items():
            if official.startswith(f"{stem}."):
                names[official.replace(stem, other)] = Piece(official)
    return names


def _role(name: str, names: Mapping[str, Piece]) -> tuple[Piece | None, str]:
    """The parameter that a tensor is; or the weight it stands beside, and the last part of its name."""
    name = name.removeprefix("model.")
    if name in names:
        return names[name], ""
    stem, _, last = name.rpartition(".")
    return names.get(f"{stem}.weight"), last


def _kind(header: Header, piece: Piece | None, last: str, layers: Mapping[str, tuple[int, ...]]) -> torch.dtype | None:
    """Dtype of the packed values, where a tensor is the weight of a linear layer and holds such."""
    if piece is None or piece.name not in layers:
        return None
    if last == _WORDS:
        rows, columns = _part_shape(layers[piece.name], piece)
        return torch.int8 if (header.dtype, header.shape) == ("I32", (rows, -(-columns // 4))) else None
    return None if last else _KINDS.get(header.dtype)


def _spelled(official: str) -> Iterator[tuple[Spelling, tuple[str, ...]]]:
    """The other spellings of one official name."""
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


def _swap_halves(tensor: torch.Tensor, heads: int, *, to_pairs: bool) -> torch.Tensor:
    """Rows of q or k from rotary halves to consecutive pairs, or back.

    Within a head of width H, row ``c * H / 2 + i`` of the halves is row ``2 * i + c`` of the pairs.
    """
    inner = (2, -1) if to_pairs else (-1, 2)
    return torch.unflatten(tensor, 0, (heads, *inner)).transpose(1, 2).flatten(0, 2)


# ---- strictness -----------------------------------------------------------------------------------------------------

_REFUSED = "quantised in a way that is not supported"
_FAULTS = (
    "missing",
    "unexpected",
    "of a wrong shape",
    "given twice",
    "of scales without a packed weight",
    "of one weight packed in different ways",
    _REFUSED,
)
_Faults = defaultdict[str, list[str]]
"""Fault -> tensors that have it."""


def check(config: VisionConfig, headers: Iterable[Header], source: str) -> dict[str, torch.dtype]:
    """Compare what a checkpoint holds with what a model needs.

    Args:
        config: The model.
        headers: All vision tensors of the checkpoint.
        source: What to call the checkpoint in the message.

    Returns:
        Official names of the linear layers that are packed, and the dtype of their values.

    Raises:
        CheckpointError: With every missing, unexpected, doubled, wrongly packed and misshapen tensor, by name.
    """
    shapes, names, layers = expected_shapes(config), known_names(config), packable(config)
    faults = _Faults(list)
    found: dict[Piece, tuple[Header, torch.dtype | None]] = {}
    beside: dict[Piece, list[tuple[str, Header]]] = {}
    wrong: set[Piece] = set()
    for header in headers:
        piece, last = _role(header.name, names)
        kind = _kind(header, piece, last, layers)
        if piece is not None and (not last or kind is not None):
            if piece in found:
                faults["given twice"].append(f"{found[piece][0].name} and {header.name}")
            if piece not in found or kind is not None:
                found[piece] = header, kind
            expected = _part_shape(shapes[piece.name], piece)
            if kind is None and header.dtype not in _FLOATS:
                faults[_REFUSED].append(f"{header.name} ({header.dtype})")
                wrong.add(piece)
            elif not last and header.shape != expected:
                faults["of a wrong shape"].append(f"{header.name} is {list(header.shape)}, expected {list(expected)}")
        elif piece is not None and last in (*SCALE_NAMES, _SHAPE, *_PASSED_OVER):
            beside.setdefault(piece, []).append((last, header))
        elif header.dtype not in _FLOATS or _PACKED.search(header.name):
            faults[_REFUSED].append(f"{header.name} ({header.dtype})")
            if piece is not None:
                wrong.add(piece)
        else:
            faults["unexpected"].append(header.name)

    packed: dict[str, torch.dtype] = {}
    for piece in {**found, **beside}:
        weight, kind = found.get(piece, (None, None))
        if piece in wrong:
            others = [one for last, one in beside.get(piece, ()) if last not in _PASSED_OVER]
            faults[_REFUSED] += [f"{one.name} ({one.dtype})" for one in others]
        elif weight is None or kind is None:
            faults["of scales without a packed weight"] += [one.name for _, one in beside.get(piece, ())]
        else:
            packed[piece.name.removesuffix(".weight")] = kind
            _check_scales(weight, _part_shape(shapes[piece.name], piece), beside.get(piece, []), faults)
    for name in shapes:
        parts = {part: found[Piece(name, part)] for part in (None, 0, 1, 2) if Piece(name, part) in found}
        known = {*parts, *(piece.part for piece in wrong if piece.name == name)}
        if None in parts and len(parts) > 1:
            faults["given twice"].append(" and ".join(sorted(header.name for header, _ in parts.values())))
        elif not known:
            faults["missing"].append(name)
        elif None not in known:
            faults["missing"] += [f"{name} ({'qkv'[part]} third)" for part in range(3) if part not in known]
            if len({kind for _, kind in parts.values()}) > 1:
                faults["of one weight packed in different ways"] += [
                    f"{header.name} ({header.dtype})" for header, _ in parts.values()
                ]
    refuse(f"{source} does not fit {config.family}", {fault: faults[fault] for fault in _FAULTS})
    return packed


def _check_scales(weight: Header, shape: tuple[int, ...], beside: list[tuple[str, Header]], faults: _Faults) -> None:
    """Find fault with what stands beside a packed weight."""
    stem, _, last = weight.name.rpartition(".")
    scales = [one for name, one in beside if name in SCALE_NAMES]
    if not scales:
        faults["missing"].append(f"{stem}.{SCALE_NAMES[0]}")
    if len(scales) > 1:
        faults["given twice"].append(" and ".join(scale.name for scale in scales))
    allowed = scale_shapes(*shape)
    for scale in scales:
        if scale.dtype not in _SCALES:
            faults[_REFUSED].append(f"{scale.name} ({scale.dtype})")
        elif scale.shape not in allowed:
            known = ", ".join(str(list(shape)) for shape in dict.fromkeys(allowed))
            faults["of a wrong shape"].append(f"{scale.name} is {list(scale.shape)}, expected one of {known}")
    told = [one for name, one in beside if name == _SHAPE]
    if last == _WORDS and not told:
        faults["missing"].append(f"{stem}.{_SHAPE}")
    for one in told:
        if last != _WORDS:
            faults["unexpected"].append(one.name)
        elif (one.dtype, one.shape) not in (("I64", (2,)), ("I32", (2,))):
            faults["of a wrong shape"].append(f"{one.name} is {one.dtype} {list(one.shape)}, expected I64 [2]")


def _part_shape(shape: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    return shape if piece.part is None else (shape[0] // 3, *shape[1:])


def refuse(what: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Report every tensor at fault at once.

    Args:
        what: Begins the message.
        problems: Fault -> tensors that have it.

    Raises:
        CheckpointError: There is at least one.
    """
    faults = [
        f"{len(names)} {fault}: {', '.join(names[:_LISTED])}{' ...' if len(names) > _LISTED else ''}"
        for fault, names in problems.items()
        if names
    ]
    if faults:
        raise CheckpointError(f"{what}; tensors {'; '.join(faults)}")


@torch.no_grad()
def load_tensors(model: VisionModel, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Copy tensors into a model as they come.

    Args:
        model: Where they go; its dtype and device stay. Linear layers become packed or plain as the tensors are.
        tensors: Name in any known spelling, and values on any device, in any floating dtype or packed, strided as they
            like. Tensors of the language model are passed over.

    Returns:
        Official names of the parameters that were filled: all of them.

    Raises:
        CheckpointError: As ``check``; the model may be partly filled by then.
    """
    names, layers = known_names(model.config), packable(model.config)
    headers = []
    scales: dict[str, list[tuple[Piece, str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        if not is_vision(name):
            continue
        header = Header(name, tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
        headers.append(header)
        piece, last = _role(name, names)
        if piece is None:
            continue
        kind = _kind(header, piece, last, layers)
        if last in SCALE_NAMES:
            scales.setdefault(piece.name, []).append((piece, last, tensor))
        elif last == _SHAPE and piece.name in layers:
            _refuse_shape(name, tensor, _part_shape(layers[piece.name], piece))
        if kind is None and (last or header.dtype not in _FLOATS):
            continue
        if piece.name in layers:
            model.pack(piece.name.removesuffix(".weight"), kind)
        target: torch.Tensor = model.get_parameter(piece.name)
        if piece.part is not None:
            target = torch.unflatten(target, 0, (3, -1))[piece.part]
        if last == _WORDS:
            tensor = _values(tensor, target.shape[1])
        if tensor.shape == target.shape:
            _refuse_nan(name, tensor)
            if piece.part in (0, 1):
                tensor = _swap_halves(tensor, model.config.num_heads, to_pairs=True)
            target.copy_(tensor)
    packed = check(model.config, headers, "the checkpoint")
    for layer in packed:
        _set_scales(model, layer, scales[f"{layer}.weight"])
    return set(dict(model.named_parameters()))


def _values(words: torch.Tensor, columns: int) -> torch.Tensor:
    """int8 values (O, I) out of int32 (O, I / 4), rounded up."""
    return (words.contiguous().view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)


def _refuse_shape(name: str, told: torch.Tensor, shape: tuple[int, ...]) -> None:
    """A matrix that says of itself that it has another shape."""
    if told.shape == (2,) and told.tolist() != list(shape):
        raise CheckpointError(f"{name} says {told.tolist()}, expected {list(shape)}")


def _refuse_nan(name: str, tensor: torch.Tensor) -> None:
    """A NaN of FP8 would not survive being unpacked, as others do until features are looked at."""
    if tensor.dtype == torch.float8_e4m3fn and bool(((tensor.view(torch.uint8) & 127) == 127).any()):
        raise CheckpointError(f"{name} holds NaN")


def _set_scales(model: VisionModel, name: str, given: list[tuple[Piece, str, torch.Tensor]]) -> None:
    """Give a packed layer its scales; those of thirds become one for each row, turned as the rows are."""
    layer = model.get_submodule(name)
    assert isinstance(layer, PackedLinear)
    piece, last, scale = given[0]
    if piece.part is not None:
        thirds = []
        for piece, _, third in sorted(given, key=lambda one: one[0].part or 0):
            rows = row_scales(third.float(), layer.out_features // 3)
            thirds.append(rows if piece.part == 2 else _swap_halves(rows, model.config.num_heads, to_pairs=True))
        across = max(third.shape[1] for third in thirds)
        scale = torch.cat([third.expand(-1, across) for third in thirds])
    layer.set_scale(scale, last)


# ---- files ----------------------------------------------------------------------------------------------------------


def load_vision(
    model_or_config: VisionModel | VisionConfig,
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> VisionModel:
    """Load a tower and projector.

    Args:
        model_or_config: A model to fill, or a configuration to build one from.
        path: Checkpoint directory, safetensors file, or ``owner/name`` on the Hugging Face hub.
        dtype: Of a model that is built; None is float32. A given model keeps its own. Packed weights stay packed.
        device: Of a model that is built; None is the CPU. A given model keeps its own.

    Returns:
        The model, in evaluation mode.

    Raises:
        CheckpointError: Files are missing or broken, or the tensors are not exactly those of the model.
        MissingDependencyError: The path is a hub id, and ``huggingface_hub`` is not installed.
    """
    local = resolve(path)
    config = model_or_config.config if isinstance(model_or_config, VisionModel) else model_or_config
    shards = vision_shards(local)
    headers = [header for shard, names in shards.items() for header in read_headers(shard, names)]
    packed = check(config, headers, str(local))
    if isinstance(model_or_config, VisionModel):
        model = model_or_config
    else:
        model = VisionModel.empty(config, dtype or torch.float32, device or "cpu", packed=packed)
    load_tensors(model, read_tensors(shards))
    return model.eval()


def vision_shards(path: str | Path) -> dict[Path, list[str]]:
    """The files of a local checkpoint that hold vision, without opening others.

    Args:
        path: Checkpoint directory or safetensors file.

    Returns:
        File -> names of its vision tensors.

    Raises:
        CheckpointError: There is neither an index nor ``model.safetensors``, the index is broken, or a file it names
            is not there.
    """
    return shards_with(path, is_vision)


def shards_with(path: str | Path, wanted: Callable[[str], bool]) -> dict[Path, list[str]]:
    """The files of a local checkpoint that hold some tensors, without opening others.

    Args:
        path: Checkpoint directory or safetensors file.
        wanted: Says of a name whether it is one of them.

    Returns:
        File -> names of the wanted tensors in it.

    Raises:
        CheckpointError: There is neither an index nor ``model.safetensors``, the index is broken, or a file it names
            is not there.
    """
    path = Path(path)
    if path.is_file():
        return {path: _names(path, wanted)}
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path} holds neither {INDEX} nor {SINGLE}")
        return {path / SINGLE: _names(path / SINGLE, wanted)}
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping):
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    shards: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if wanted(name):
            if not isinstance(file, str) or Path(file).name != file or len(file) > 255:
                shown = repr(file)[:100]
                raise CheckpointError(f"{path / INDEX}: {name} is said to be in {shown}, which is not a file name")
            shards.setdefault(path / file, []).append(name)
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise CheckpointError(f"{path}: {INDEX} names {', '.join(absent)}, which is not there")
    return shards


def _names(file: Path, wanted: Callable[[str], bool]) -> list[str]:
    with open_shard(file) as tensors:
        return [name for name in tensors.keys() if wanted(name)]  # noqa: SIM118 - not a mapping


def open_shard(file: Path) -> Any:
    """Open a safetensors file.

    Args:
        file: Which.

    Returns:
        What ``safetensors.safe_open`` gives, to be used in a ``with`` statement.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error


def read_headers(file: Path, names: list[str]) -> Iterator[Header]:
    """What a file says of some of its tensors, without their values.

    Args:
        file: Which.
        names: Those of them that it does not have are passed over.

    Yields:
        Name, shape and dtype of each.

    Raises:
        CheckpointError: It cannot be read.
    """
    with open_shard(file) as tensors:
        present = set(tensors.keys())
        for name in names:
            if name in present:  # a name the index has and the shard has not is reported as missing
                view = tensors.get_slice(name)
                yield Header(name, tuple(view.get_shape()), view.get_dtype())


def read_tensors(shards: Mapping[Path, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of some files, one at a time, on the CPU.

    Args:
        shards: File -> names to read from it.

    Yields:
        Name and values.

    Raises:
        CheckpointError: A file cannot be read.
    """
    for file, names in shards.items():
        with open_shard(file) as tensors:
            for name in names:
                yield name, tensors.get_tensor(name)


def read_config(path: str | Path) -> tuple[VisionConfig, dict[str, Any]]:
    """Read the configuration of a checkpoint.

    Args:
        path: Checkpoint directory, a file in it, or ``owner/name`` on the hub.

    Returns:
        The vision configuration, with the picture rule of ``preprocessor_config.json`` where that file exists, and the
        whole ``config.json``.

    Raises:
        CheckpointError: There is no ``config.json``, or a file is not JSON.
        ConfigError: It is not a model this package knows.
    """
    local = resolve(path)
    directory = local if local.is_dir() else local.parent
    raw = read_json(directory / CONFIG)
    preprocessor = directory / PREPROCESSOR
    return config_from_dict(raw, read_json(preprocessor) if preprocessor.is_file() else None), raw


def resolve(path: str | Path, *, whole: bool = False) -> Path:
    """Find a checkpoint on this machine, or bring its vision files from the hub.

    Args:
        path: Directory, file, or ``owner/name``.
        whole: Bring the language model and the tokenizer too; never any code.

    Returns:
        A local directory or file.

    Raises:
        CheckpointError: It is neither here nor on the hub.
        MissingDependencyError: It looks like a hub id, and ``huggingface_hub`` is not installed.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise CheckpointError(f"a checkpoint cannot be found by {type(path).__name__}; give a path or owner/name")
    local = Path(path)
    if path == "" or str(path).isspace():
        raise CheckpointError("the name of the checkpoint is empty; give a path or owner/name")
    try:
        if local.exists():
            return local
    except (OSError, ValueError) as error:  # a name that is too long, or holds a NUL
        raise CheckpointError(f"{str(path)[:100]!r} is not a path: {error}") from None
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", str(path)):
        known = str(path).lower() in FAMILIES or str(path).lower() in ALIASES
        family = "; a family has no weights, which only a checkpoint has" if known else ""
        raise CheckpointError(f"{path} is not a directory or file here, nor an owner/name on the hub{family}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependencyError(
            f"{path} is not a local path; to bring it from the Hugging Face hub: pip install huggingface_hub"
        ) from error
    try:
        if whole:
            return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors", "tiktoken.model"]))
        directory = Path(snapshot_download(str(path), allow_patterns=[CONFIG, PREPROCESSOR, INDEX]))
        files = [SINGLE]
        if (directory / INDEX).is_file():
            weight_map = read_json(directory / INDEX).get("weight_map") or {}
            files = sorted({file for name, file in weight_map.items() if is_vision(name)})
        return Path(snapshot_download(str(path), allow_patterns=[CONFIG, PREPROCESSOR, INDEX, *files]))
    except CheckpointError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:300]  # some of the hub's messages have several lines
        raise CheckpointError(f"{path} is not here, and the hub did not give it: {why}") from error


# ---- writing --------------------------------------------------------------------------------------------------------


def save_vision(model: VisionModel, path: str | Path, spelling: Spelling = "official") -> None:
    """Write a tower and projector.

    ``config.json`` says nothing of packed weights: it has no ``quantization_config``, which other programs want to see
    before they read them. In transformers' spelling, where q and k are turned, scales for blocks of a fused weight
    become rows of scales, which only this package reads.

    Args:
        model: What to write, in its own dtype; packed weights as they are, int8 values one by one.
        path: A ``.safetensors`` file, or a directory that gets ``model.safetensors``, ``config.json`` and
            ``preprocessor_config.json``.
        spelling: Whose names to write; official unless another program wants its own.

    Raises:
        ConfigError: A directory is asked for, and the configuration has a value those files cannot express.
    """
    path = Path(path)
    file = path
    if path.suffix != ".safetensors":
        config, preprocessor = config_dicts(model.config)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (path / PREPROCESSOR).write_text(json.dumps(preprocessor, indent=2) + "\n", encoding="utf-8")
        file = path / SINGLE
    tensors: dict[str, torch.Tensor] = {}
    for official, tensor in model.state_dict().items():
        names = next((names for kind, names in _spelled(official) if kind == spelling), (official,))
        if len(names) == 1:
            tensors[names[0]] = tensor.cpu().contiguous()
            continue
        if official.endswith(SCALE_NAMES):
            tensor = row_scales(tensor, 3 * model.config.qkv_size)
        for part, name in enumerate(names):
            third = torch.unflatten(tensor, 0, (3, -1))[part].cpu()
            tensors[name] = (
                third if part == 2 else _swap_halves(third, model.config.num_heads, to_pairs=False)
            ).clone()
    prefix = "model." if spelling == "transformers" else ""
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def save_tensors(tensors: Mapping[str, torch.Tensor], path: str | Path, metadata: dict[str, str]) -> None:
    """Write tensors that are no weights, such as features.

    Args:
        tensors: On any device.
        path: The safetensors file.
        metadata: Text that goes into its header.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    # safetensors renames a private file into place: links are followed first, and others may read the result.
    path = Path(path).resolve()
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)
    except (OSError, SafetensorError) as error:
        raise InvalidInputError(f"{path} cannot be written: {str(error)[:200]}", param="out") from None


def check_vision(path: str | Path) -> dict[str, Any]:
    """Read the vision part of a checkpoint and hold it against what its model needs.

    Args:
        path: Checkpoint directory, or ``owner/name`` on the Hugging Face hub.

    Returns:
        ``path``, ``family``, ``layers``, ``width``, ``language_width``, ``shards`` (files that hold vision),
        ``tensors``, ``parameters`` (numbers of the model, scales apart), ``bytes``, ``dtypes`` and ``packed`` (how
        many linear layers of tower and projector are packed, and in what).

    Raises:
        CheckpointError: Files are missing or broken, tensors are not exactly those of the model, or one of them holds
            NaN, infinity or another shape of a weight.
        ConfigError: ``config.json`` is not of a known model.
    """
    local = resolve(path)
    config, _ = read_config(local)
    shards = vision_shards(local)
    headers = [header for shard, names in shards.items() for header in read_headers(shard, names)]
    packed = check(config, headers, str(local))
    names, shapes = known_names(config), expected_shapes(config)
    broken, size = [], 0
    for name, tensor in read_tensors(shards):
        size += tensor.nbytes
        # FP8 has NaN and no infinity, and no isfinite of its own
        eight_bits = tensor.is_floating_point() and tensor.dtype.itemsize == 1
        if not (tensor.bfloat16() if eight_bits else tensor).isfinite().all():
            broken.append(name)
        piece, last = _role(name, names)
        if piece is not None and last == _SHAPE:
            _refuse_shape(name, tensor, _part_shape(shapes[piece.name], piece))
    if broken:
        raise CheckpointError(f"{local}: {len(broken)} tensor(s) hold NaN or infinity: {', '.join(broken[:_LISTED])}")
    return {
        "path": str(local),
        "family": config.family,
        "layers": config.num_layers,
        "width": config.hidden_size,
        "language_width": config.text_hidden_size,
        "shards": len(shards),
        "tensors": len(headers),
        "parameters": sum(map(math.prod, shapes.values())),
        "bytes": size,
        "dtypes": ", ".join(sorted({header.dtype for header in headers})),
        "packed": _describe(config, packed),
    }


def _describe(config: VisionConfig, packed: Mapping[str, torch.dtype]) -> str:
    """Such as ``projector: 2 of 2 linear layers in F8_E4M3``."""
    layers = [name.removesuffix(".weight") for name in packable(config)]
    said = []
    for place, prefix in zip(("tower", "projector"), PREFIXES[config.family], strict=True):
        among = [name for name in layers if name.startswith(prefix)]
        for word, kind in _KINDS.items():
            count = sum(packed.get(name) == kind for name in among)
            if count:
                said.append(f"{place}: {count} of {len(among)} linear layers in {word}")
    return "; ".join(said) or "nothing"
