"""The files of a checkpoint: where it is, which of them hold vision, and what is in them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moonvit.checkpoint.names import Header, is_vision
from moonvit.errors import CheckpointError, MissingDependencyError
from moonvit.families import ALIASES, FAMILIES, VisionConfig, config_from_dict, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"


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


def read_tensors(
    shards: Mapping[Path, list[str]], take: Callable[[str, tuple[int, ...], Any], torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of some files, one at a time, on the CPU.

    Args:
        shards: File -> names to read from it.
        take: Gives what is wanted of a tensor, by its name, its shape and an indexable view of it; None is all.

    Yields:
        Name and values.

    Raises:
        CheckpointError: A file cannot be read.
    """
    for file, names in shards.items():
        with open_shard(file) as tensors:
            for name in names:
                if take is None:
                    yield name, tensors.get_tensor(name)
                else:
                    view = tensors.get_slice(name)
                    yield name, take(name, tuple(view.get_shape()), view)


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
