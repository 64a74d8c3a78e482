"""Linear layers whose weights stay packed: FP8 or int8 values, and the scales that make numbers of them.

A packed weight is a matrix of one-byte values and a few float32 scales; the number is their product. ``PackedLinear``
unpacks some rows of the matrix at a time into the dtype of what it is given, multiplies, and drops them, so that beside
the bytes of the file there is never more than one block, whatever the size of the matrix or of the request. Activations
are never packed: what a file says of theirs has no use here.

Shape suffixes: R rows of a chunk, I columns of a matrix (its inputs), O rows (its outputs), A and B scales along each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import nn

from moonvit.errors import ConfigError
from moonvit.plan import packed_rows

PACKED_DTYPES = (torch.float8_e4m3fn, torch.int8)
"""What a packed weight can be."""
SCALE_NAMES = ("weight_scale", "weight_scale_inv")
"""What files call the scales of ``weight``; values are multiplied by either."""
BLOCK = 128
"""Rows, and columns, that share a scale where a file has scales for blocks."""
_AT_ONCE = 64


def scale_shapes(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that the scales of a matrix may have.

    Args:
        rows: Of the matrix (O).
        columns: Of the matrix (I).

    Returns:
        For the whole matrix, for each row, for each block of 128 x 128 and for each row of such a block.
    """
    across = -(-columns // BLOCK)
    return (), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // BLOCK), across), (rows, across)


def row_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales of each row.

    Args:
        scale: In one of ``scale_shapes``.
        rows: Of the matrix.

    Returns:
        (O, B), a view where nothing has to be repeated.
    """
    scale_AB = _scale_AB(scale)
    if scale_AB.shape[0] == 1:
        return scale_AB.expand(rows, -1)
    return scale_AB if scale_AB.shape[0] == rows else scale_AB.repeat_interleave(BLOCK, dim=0)[:rows]


def _scale_AB(scale: torch.Tensor) -> torch.Tensor:
    return scale if scale.ndim == 2 else scale.reshape(-1, 1)


def unpack_into(
    weight_OI: torch.Tensor, scale: torch.Tensor, first: int, last: int, out_RI: torch.Tensor
) -> torch.Tensor:
    """Numbers of some rows of a packed matrix, each value times its scale.

    Args:
        weight_OI: The packed values.
        scale: float32, in one of ``scale_shapes``.
        first: First row.
        last: Row after the last.
        out_RI: float32 (last - first, I), contiguous, filled; nothing else of its size is made.

    Returns:
        ``out_RI``.
    """
    rows = weight_OI.shape[0]
    _widen(weight_OI[first:last], out_RI)
    scale_AB = _scale_AB(scale)
    if scale_AB.shape[0] == 1:
        _multiply(out_RI, scale_AB)
    elif scale_AB.shape[0] == rows:
        _multiply(out_RI, scale_AB[first:last])
    else:
        for block in range(first // BLOCK, -(-last // BLOCK)):
            some_RI = out_RI[max(0, block * BLOCK - first) : (block + 1) * BLOCK - first]
            _multiply(some_RI, scale_AB[block : block + 1])
    return out_RI


def _multiply(rows_RI: torch.Tensor, scale_AB: torch.Tensor) -> None:
    """Rows by the scales of each, or of all where A is 1: one for the whole row, or one for each block of it."""
    if scale_AB.shape[1] == 1:
        rows_RI.mul_(scale_AB)
        return
    full = rows_RI.shape[1] // BLOCK
    torch.unflatten(rows_RI[:, : full * BLOCK], 1, (full, BLOCK)).mul_(scale_AB[:, :full, None])
    rows_RI[:, full * BLOCK :].mul_(scale_AB[:, full:])


def _widen(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Packed values as float32, before their scale."""
    if packed.dtype != torch.float8_e4m3fn or packed.device.type != "cpu":
        out.copy_(packed)
        return
    # torch converts FP8 one value at a time on a CPU. Its bits, moved to where float16 has sign, exponent and mantissa,
    # are the same number times 2 ** -8, subnormal ones too, and float16 is widened right even where a library has made
    # the CPU take subnormal float32 for zero. Only NaN would become 480, and is refused when it comes.
    count, numbers = out.numel(), out.view(-1)
    bits = numbers.view(torch.int16)[count:]
    bits.view(packed.shape).copy_(packed.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-0x4001)
    # They stand in the second half of the buffer. Numbers fill it from the front, half of what is left at a time: as
    # far as the bits of the others.
    first = 0
    while first < count:
        last = first + (count - first) // 2 if count - first > _AT_ONCE else count
        halves = bits[first:last].view(torch.float16)
        numbers[first:last].copy_(halves if last < count else halves.clone())
        first = last
    out.mul_(2.0**8)


def unpack(weight_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Numbers of a packed matrix.

    Args:
        weight_OI: The packed values.
        scale: float32, in one of ``scale_shapes``.

    Returns:
        float32 (O, I).
    """
    out_OI = torch.empty(weight_OI.shape, dtype=torch.float32, device=weight_OI.device)
    return unpack_into(weight_OI, scale, 0, weight_OI.shape[0], out_OI)


def linear_into(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``F.linear`` into a buffer that exists.

    Args:
        x: (R, I).
        weight: (O, I), of the same dtype.
        bias: (O,), or None.
        out: (R, O), filled; its rows may be parts of longer ones.

    Returns:
        ``out``.
    """
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


class PackedLinear(nn.Module):
    """A linear layer that keeps the bytes of the file.

    Parameters: ``weight``, float8_e4m3fn or int8 (O, I); its scales, float32, under the name and in the shape of the
    file; ``bias`` (O,) or none. ``to``, ``half`` and the like move all of them, and change the dtype of the bias alone.

    Args:
        in_features: Columns (I).
        out_features: Rows (O).
        kind: ``torch.float8_e4m3fn`` or ``torch.int8``.
        bias: The bias, if there is one.
        device: Where the values go, which are not set yet; nor are the scales.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kind: torch.dtype,
        bias: nn.Parameter | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        values = torch.empty(out_features, in_features, dtype=kind, device=device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_parameter("bias", bias)
        self.scale_name = SCALE_NAMES[0]

    @property
    def kind(self) -> torch.dtype:
        """Dtype of the packed values."""
        return self.weight.dtype

    @property
    def scale(self) -> torch.Tensor:
        """The scales."""
        scale: torch.Tensor = getattr(self, self.scale_name)
        return scale

    def set_scale(self, scale: torch.Tensor, name: str = SCALE_NAMES[0]) -> None:
        """Give the layer its scales.

        Args:
            scale: In one of ``scale_shapes``, in any floating dtype; a copy is kept, in float32.
            name: One of ``SCALE_NAMES``.

        Raises:
            ConfigError: It has another shape or name.
        """
        if tuple(scale.shape) not in scale_shapes(self.out_features, self.in_features) or name not in SCALE_NAMES:
            raise ConfigError(
                f"{name} of shape {list(scale.shape)} is none of a matrix of {self.out_features} x {self.in_features}",
                param="scale",
            )
        self._parameters.pop(self.scale_name, None)
        self.scale_name = name
        values = scale.to(self.weight.device, torch.float32, copy=True)
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def forward(self, x_RI: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Args:
            x_RI: Rows, in the dtype to work in, which is also that of the bias.

        Returns:
            (R, O), in the same dtype.
        """
        return self.into(x_RI, x_RI.new_empty(x_RI.shape[0], self.out_features), 0, self.out_features)

    def into(self, x_RI: torch.Tensor, out_RO: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Outputs ``first:last``, into a buffer that exists.

        Args:
            x_RI: Rows, in the dtype to work in.
            out_RO: (R, last - first), filled.
            first: First row of the matrix.
            last: Row after its last.

        Returns:
            ``out_RO``.
        """
        step = packed_rows(last - first, self.in_features)
        wide_OI = torch.empty(step, self.in_features, dtype=torch.float32, device=x_RI.device)
        for start in range(first, last, step):
            rows = slice(start, min(start + step, last))
            block_OI = unpack_into(self.weight, self.scale, start, rows.stop, wide_OI[: rows.stop - start]).to(
                x_RI.dtype
            )
            bias_O = None if self.bias is None else self.bias[rows]
            linear_into(x_RI, block_OI, bias_O, out_RO[:, start - first : rows.stop - first])
            del block_OI  # before the next one is made
        return out_RO

    def extra_repr(self) -> str:
        """Shape and kind."""
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        # Casts of a module leave integers alone, so values and scales are shown to them as such.
        kept = {id(tensor) for name, tensor in self._parameters.items() if name != "bias"}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in kept:
                return fn(tensor)
            bits = tensor.detach().view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.int32)
            result = fn(bits)
            # Module.type casts integers too; only where to is taken from it.
            return (result if result.dtype == bits.dtype else bits.to(result.device)).view(tensor.dtype)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


Linear: TypeAlias = nn.Linear | PackedLinear
"""A linear layer of a tower or projector."""


def as_kind(layer: Linear, kind: torch.dtype | None, dtype: torch.dtype) -> Linear:
    """A layer of the same shape and bias, with room for weights of another kind.

    Args:
        layer: The layer.
        kind: Dtype of packed values; None is a weight that is not packed.
        dtype: Dtype of the latter.

    Returns:
        ``layer`` where it is of this kind already; else a new one, whose weight and scales are not set.
    """
    if kind == (layer.kind if isinstance(layer, PackedLinear) else None):
        return layer
    device, bias = layer.weight.device, layer.bias
    if kind is not None:
        return PackedLinear(layer.in_features, layer.out_features, kind, bias, device)
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta", dtype=dtype)
    plain.to_empty(device=device)
    plain.register_parameter("bias", bias)
    return plain


class Unpacked(Mapping[str, torch.Tensor]):
    """A state dict without packed weights: each is unpacked when it is asked for, into float32, and its scales hidden.

    Args:
        state: State dict of a model.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        stems = [name.removesuffix(".weight") for name, tensor in state.items() if tensor.dtype in PACKED_DTYPES]
        names = (f"{stem}.{scale}" for stem in stems for scale in SCALE_NAMES)
        self._scales = {name.rpartition(".")[0] + ".weight": name for name in names if name in state}
        self._hidden = set(self._scales.values())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._hidden:
            raise KeyError(name)
        tensor = self._state[name]
        return unpack(tensor, self._state[self._scales[name]]) if name in self._scales else tensor

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._state if name not in self._hidden)

    def __len__(self) -> int:
        return len(self._state) - len(self._hidden)
