"""Vision weights from and to safetensors, under the names of every place they are found in.

The table in ``names.py`` says what each tensor is called elsewhere; everything here reads it, in one direction or the
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moonvit.checkpoint.files import (
    CONFIG,
    INDEX,
    PREPROCESSOR,
    SINGLE,
    open_shard,
    read_config,
    read_headers,
    read_tensors,
    resolve,
    shards_with,
    vision_shards,
)
from moonvit.checkpoint.names import (
    DTYPE_NAMES,
    FLOATS,
    KINDS,
    SHAPE,
    WORDS,
    Header,
    Piece,
    Spelling,
    expected_shapes,
    is_vision,
    kind_of,
    known_names,
    packable,
    part_shape,
    role_of,
    spelled,
    swap_halves,
)
from moonvit.checkpoint.strictness import LISTED, check, refuse
from moonvit.deploy import split_tensors
from moonvit.errors import CheckpointError, InvalidInputError
from moonvit.families import PREFIXES, VisionConfig, config_dicts
from moonvit.model import VisionModel
from moonvit.quantised import SCALE_NAMES, PackedLinear, row_scales

__all__ = [
    "Header",
    "check_vision",
    "divide",
    "expected_shapes",
    "is_vision",
    "known_names",
    "load_tensors",
    "load_vision",
    "open_shard",
    "packable",
    "packed_layers",
    "read_config",
    "read_headers",
    "refuse",
    "resolve",
    "save_tensors",
    "save_vision",
    "shards_with",
    "vision_shards",
]


def load_vision(
    model_or_config: VisionModel | VisionConfig,
    path: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    part: tuple[int, int] | None = None,
) -> VisionModel:
    """Load a tower and projector.

    Args:
        model_or_config: A model to fill, or a configuration to build one from.
        path: Checkpoint directory, safetensors file, or ``owner/name`` on the Hugging Face hub.
        dtype: Of a model that is built; None is float32. A given model keeps its own. Packed weights stay packed.
        device: Of a model that is built; None is the CPU. A given model keeps its own.
        part: Rank and ranks of a tensor-parallel group, where only that rank's heads and part of the MLP are read, into
            a model that is built; None is all.

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
        model, take = model_or_config, None
    else:
        own, take = _own(config, part)
        model = VisionModel.empty(own, dtype or torch.float32, device or "cpu", packed=packed)
    load_tensors(model, read_tensors(shards, take))
    return model.eval()


def _own(config: VisionConfig, part: tuple[int, int] | None) -> tuple[VisionConfig, Any]:
    """What a rank has of a model, and what takes that from tensors of the whole."""
    if part is None:
        return config, None
    from moonvit.checkpoint.parts import Part  # torch's tensor-parallel types take a second to import

    return split_tensors(config, part[1]), Part(config, *part).take


def divide(
    model: VisionModel,
    part: tuple[int, int],
    tensors: Iterable[tuple[str, torch.Tensor]] | None = None,
    device: torch.device | None = None,
) -> VisionModel:
    """One rank's part of a model that is in memory.

    Args:
        model: The whole model; with ``tensors`` it may have no memory of its own.
        part: Rank and ranks of a tensor-parallel group.
        tensors: Name in any known spelling, and values, one at a time; None are those of the model.
        device: Where the part goes; None is where the model is.

    Returns:
        A model with that rank's heads and part of the MLP, in evaluation mode.

    Raises:
        ConfigError: The ranks do not divide heads and MLP.
        CheckpointError: As ``load_tensors``, or scales of packed weights would have to be divided.
    """
    own, take = _own(model.config, part)
    mine = VisionModel.empty(own, model.dtype, device or model.device, model.attention)
    tensors = model.state_dict().items() if tensors is None else tensors
    load_tensors(mine, ((name, take(name, tuple(tensor.shape), tensor)) for name, tensor in tensors))
    return mine.eval()


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
        header = Header(name, tuple(tensor.shape), DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)))
        headers.append(header)
        piece, last = role_of(name, names)
        if piece is None:
            continue
        kind = kind_of(header, piece, last, layers)
        if last in SCALE_NAMES:
            scales.setdefault(piece.name, []).append((piece, last, tensor))
        elif last == SHAPE and piece.name in layers:
            _refuse_shape(name, tensor, part_shape(layers[piece.name], piece))
        if kind is None and (last or header.dtype not in FLOATS):
            continue
        if piece.name in layers:
            model.pack(piece.name.removesuffix(".weight"), kind)
        target: torch.Tensor = model.get_parameter(piece.name)
        if piece.part is not None:
            target = torch.unflatten(target, 0, (3, -1))[piece.part]
        if last == WORDS:
            tensor = _values(tensor, target.shape[1])
        if tensor.shape == target.shape:
            _refuse_nan(name, tensor)
            if piece.part in (0, 1):
                tensor = swap_halves(tensor, model.config.num_heads, to_pairs=True)
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
            thirds.append(rows if piece.part == 2 else swap_halves(rows, model.config.num_heads, to_pairs=True))
        across = max(third.shape[1] for third in thirds)
        scale = torch.cat([third.expand(-1, across) for third in thirds])
    layer.set_scale(scale, last)


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
            piece, last = role_of(header.name, names)
            kind = kind_of(header, piece, last, layers)
            if piece is not None and kind is not None:
                packed[piece.name.removesuffix(".weight")] = kind
    return VisionModel.empty(config, device="meta", packed=packed).packed


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
        piece, last = role_of(name, names)
        if piece is not None and last == SHAPE:
            _refuse_shape(name, tensor, part_shape(shapes[piece.name], piece))
    if broken:
        raise CheckpointError(f"{local}: {len(broken)} tensor(s) hold NaN or infinity: {', '.join(broken[:LISTED])}")
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
        for word, kind in KINDS.items():
            count = sum(packed.get(name) == kind for name in among)
            if count:
                said.append(f"{place}: {count} of {len(among)} linear layers in {word}")
    return "; ".join(said) or "nothing"


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
        names = next((names for kind, names in spelled(official) if kind == spelling), (official,))
        if len(names) == 1:
            tensors[names[0]] = tensor.cpu().contiguous()
            continue
        if official.endswith(SCALE_NAMES):
            tensor = row_scales(tensor, 3 * model.config.qkv_size)
        for part, name in enumerate(names):
            third = torch.unflatten(tensor, 0, (3, -1))[part].cpu()
            tensors[name] = (third if part == 2 else swap_halves(third, model.config.num_heads, to_pairs=False)).clone()
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
