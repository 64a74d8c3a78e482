"""Whether the tensors of a checkpoint are exactly those of a model; all differences are told together."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from moonvit.checkpoint.names import (
    FLOATS,
    SHAPE,
    WORDS,
    Header,
    Piece,
    expected_shapes,
    kind_of,
    known_names,
    packable,
    part_shape,
    role_of,
)
from moonvit.errors import CheckpointError
from moonvit.families import VisionConfig
from moonvit.quantised import SCALE_NAMES, scale_shapes

_SCALES = {*FLOATS, "F8_E8M0"}
"""Scales that are read."""
_PASSED_OVER = ("input_scale", "input_zero_point", "activation_scale", "output_scale")
"""What is said of activations."""
_PACKED = re.compile(
    r"(_packed|_scale|_scale_inv|_scale_2|_zero_point|_shape|_g_idx|\.qweight|\.qzeros|\.scales|\.g_idx)$"
)
LISTED = 20
"""Names that a message has room for."""
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
        piece, last = role_of(header.name, names)
        kind = kind_of(header, piece, last, layers)
        if piece is not None and (not last or kind is not None):
            if piece in found:
                faults["given twice"].append(f"{found[piece][0].name} and {header.name}")
            if piece not in found or kind is not None:
                found[piece] = header, kind
            expected = part_shape(shapes[piece.name], piece)
            if kind is None and header.dtype not in FLOATS:
                faults[_REFUSED].append(f"{header.name} ({header.dtype})")
                wrong.add(piece)
            elif not last and header.shape != expected:
                faults["of a wrong shape"].append(f"{header.name} is {list(header.shape)}, expected {list(expected)}")
        elif piece is not None and last in (*SCALE_NAMES, SHAPE, *_PASSED_OVER):
            beside.setdefault(piece, []).append((last, header))
        elif header.dtype not in FLOATS or _PACKED.search(header.name):
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
            _check_scales(weight, part_shape(shapes[piece.name], piece), beside.get(piece, []), faults)
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
    told = [one for name, one in beside if name == SHAPE]
    if last == WORDS and not told:
        faults["missing"].append(f"{stem}.{SHAPE}")
    for one in told:
        if last != WORDS:
            faults["unexpected"].append(one.name)
        elif (one.dtype, one.shape) not in (("I64", (2,)), ("I32", (2,))):
            faults["of a wrong shape"].append(f"{one.name} is {one.dtype} {list(one.shape)}, expected I64 [2]")


def refuse(what: str, problems: Mapping[str, Sequence[str]]) -> None:
    """Report every tensor at fault at once.

    Args:
        what: Begins the message.
        problems: Fault -> tensors that have it.

    Raises:
        CheckpointError: There is at least one.
    """
    faults = [
        f"{len(names)} {fault}: {', '.join(names[:LISTED])}{' ...' if len(names) > LISTED else ''}"
        for fault, names in problems.items()
        if names
    ]
    if faults:
        raise CheckpointError(f"{what}; tensors {'; '.join(faults)}")
