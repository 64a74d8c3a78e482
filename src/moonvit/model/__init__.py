"""MoonViT: patches in, language-model features out. One streaming tower for Kimi-VL, K2.5 and K3.

``prepare`` (``metadata.py``) turns grids into everything a pass needs that is not a weight: row chunks, RoPE tables,
the index of the merge. It works on host integers and does all transfers. ``forward`` then never asks the device
anything, and takes the pack through the layers (``layers.py``) in place, in three steps:

    patches_LC -- embed --> hidden_LD -- blocks --> hidden_LD -- finish --> merged_MK --> features_ME

Of a micro-batch only three things exist for all its rows: ``hidden`` (L, D), the keys and the values of the layer at
hand (L, 2Q). Everything else lives for one chunk of R rows: normalised rows, queries, attention output, MLP, merged
rows, projector. Workspace is therefore ``s * L * (D + 2Q)`` bytes and a constant that R sets. Where even that is too
much, a block goes through its heads in G groups: keys and values of one group, and attended rows of all, take
``s * L * (2Q / G + Q)``.

Names in the state dict are those of the official checkpoints. There are no buffers. Linear layers may hold packed
weights (``quantised.py``), so a dtype to compute in is taken from norms and the position table, never from a linear.

Shape suffixes: L packed patches, R rows of a chunk, C = 588 values of a patch, D tower width, Q qkv width, N heads,
H head dimension, M merged tokens, K = 4D, E language width, T frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from moonvit.attention import Backend, row_ranges
from moonvit.errors import ConfigError, InvalidInputError
from moonvit.families import PREFIXES, VisionConfig
from moonvit.model.layers import MLP, Block, PositionTable, Projector, Tower
from moonvit.model.metadata import (
    ROWS,
    Chunk,
    Layout,
    Metadata,
    Positions,
    as_patches,
    check_frames,
    frame_table,
    prepare,
)
from moonvit.plan import TOKEN_ROWS
from moonvit.quantised import Linear, PackedLinear, as_kind

__all__ = [
    "FLOAT_DTYPES",
    "MLP",
    "ROWS",
    "Block",
    "Chunk",
    "Layout",
    "Metadata",
    "PositionTable",
    "Positions",
    "Projector",
    "VisionModel",
    "as_patches",
    "check_frames",
    "frame_table",
]

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes a tower can have."""


class VisionModel(nn.Module):
    """Tower and projector of one checkpoint.

    Args:
        config: Which model.
        attention: Backend, or ``"auto"`` for the fastest that runs where the weights are.
    """

    def __init__(self, config: VisionConfig, attention: Backend | str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.moves = 0
        self.vision_tower = Tower(config)
        self._projector_name = PREFIXES[config.family][1].rstrip(".")
        self.add_module(self._projector_name, Projector(config))
        self.eval()

    @classmethod
    def empty(
        cls,
        config: VisionConfig,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: Backend | str = "auto",
        packed: Mapping[str, torch.dtype] | None = None,
    ) -> VisionModel:
        """A model with memory for its weights, and nothing in it yet.

        Args:
            config: Which model.
            dtype: float32, bfloat16 or float16.
            device: Where the weights go.
            attention: As in the constructor.
            packed: Names of linear layers, and the dtype of their packed values; their scales come later.

        Returns:
            The model.

        Raises:
            ConfigError: The dtype is another, or a packed layer is not linear.
        """
        if dtype not in FLOAT_DTYPES:
            known = ", ".join(str(kind).removeprefix("torch.") for kind in FLOAT_DTYPES)
            raise ConfigError(f"dtype = {dtype}: a tower can be {known}", param="dtype")
        with torch.device("meta"):
            model = cls(config, attention).to(dtype)
            for name, kind in (packed or {}).items():
                model.pack(name, kind)
        return model.to_empty(device=device)

    @torch.no_grad()
    def init_weights_(self, seed: int) -> VisionModel:
        """Fill the weights with random values under which features stay near 1.

        Args:
            seed: The same seed gives the same float32 values on every device, then rounded to the model's dtype.

        Returns:
            The model.

        Raises:
            ConfigError: The seed is no whole number from 0 on, or weights are packed.
        """
        for name, values in self.random_weights(seed):
            self.get_parameter(name).copy_(values)
        return self

    def random_weights(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The values of ``init_weights_``, one parameter at a time; those of this model may be on the meta device.

        Args:
            seed: As there.

        Yields:
            Official name, and float32 values.

        Raises:
            ConfigError: As there.
        """
        if self.packed:
            raise ConfigError("random values cannot be packed; use a model without packed weights", param="packed")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ConfigError(f"seed = {seed!r}, must be a whole number of 0 to {2**63 - 1}", param="seed")
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                values = 1.0 + 0.05 * values
            elif name.endswith("bias"):
                values *= 0.02
            elif "pos_emb" in name:
                values *= 0.2
            else:
                values *= parameter[0].numel() ** -0.5
            yield name, values

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.moves += 1  # what was made from the weights may no longer be used
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    @property
    def projector(self) -> Projector:
        """``mm_projector`` or ``multi_modal_projector``."""
        module = getattr(self, self._projector_name)
        assert isinstance(module, Projector)
        return module

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tower."""
        return self.vision_tower.patch_embed.pos_emb.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tower."""
        return self.vision_tower.patch_embed.pos_emb.weight.device

    @property
    def packed(self) -> frozenset[str]:
        """Layers that hold packed weights in at least one block, by the names that ``make_plan`` has for them."""
        first, last = self.projector.linears
        layers: list[tuple[str, nn.Module]] = [("first", first), ("last", last)]
        for block in self.vision_tower.encoder.blocks:
            assert isinstance(block, Block)
            layers += [("wqkv", block.wqkv), ("wo", block.wo), ("fc0", block.mlp.fc0), ("fc1", block.mlp.fc1)]
        return frozenset(name for name, layer in layers if isinstance(layer, PackedLinear))

    def pack(self, name: str, kind: torch.dtype | None) -> None:
        """Make room in a linear layer for weights of another kind; those it had are dropped where they were of another.

        Args:
            name: The layer, such as ``"vision_tower.encoder.blocks.0.wo"``.
            kind: ``torch.float8_e4m3fn`` or ``torch.int8``; None is a weight in the model's dtype.

        Raises:
            ConfigError: The layer is not linear.
        """
        layer = self.get_submodule(name)
        if not isinstance(layer, Linear):
            raise ConfigError(f"{name} is not a linear layer, and cannot be packed", param="packed")
        parent, _, last = name.rpartition(".")
        made = as_kind(layer, kind, self.dtype)
        made._forward_hooks = layer._forward_hooks  # a sum over ranks stays where it was put
        setattr(self.get_submodule(parent), last, made)

    def prepare(
        self, grids: Iterable[Any], rows: int = ROWS, groups: int = 1, positions: Positions | None = None
    ) -> Metadata:
        """Everything a pass over some images needs beside weights and patches.

        Args:
            grids: Images of one pack: anything ``as_grids`` reads, on the host.
            rows: Rows of a chunk at most; fewer take less memory, more are faster.
            groups: Parts that the heads are cut into; a divisor of their number. More take less memory and more time.
            positions: Where resampled position tables are kept; the bits are the same without.

        Returns:
            Metadata on the model's device, good for any number of passes over patches of these grids.

        Raises:
            EmptyInputError: There are no grids.
            GridError: A grid is not legal, or has more frames than this tower takes.
            ConfigError: ``rows`` is under 1, the heads have no such groups, or the attention backend is unknown.
        """
        return prepare(self.config, grids, rows, groups, positions, self.attention, self.dtype, self.device)

    @torch.no_grad()
    def forward(
        self,
        patches_LC: torch.Tensor,
        meta: Metadata,
        dtype: torch.dtype | None = None,
        out: Sequence[torch.Tensor] | None = None,
        blocks: Callable[[torch.Tensor, Metadata], None] | None = None,
    ) -> list[torch.Tensor]:
        """Encode one pack of images. Inference only: it works in place and keeps nothing for a backward pass.

        Args:
            patches_LC: (L, 588) or (L, 3, 14, 14) on the model's device, images one behind the other; uint8 pixels, or
                normalised floats.
            meta: What ``prepare`` made for these images.
            dtype: Dtype of the features; None is the projector's, or that of ``out``.
            out: Where the features of each image go: (M, E) in any floating dtype, on the model's device. None makes
                room for each image when its turn comes.
            blocks: Who takes hidden_LD through the blocks, in place; None is the tower's encoder.

        Returns:
            features_ME of each image, in order, each with storage of its own; or the tensors of ``out``.

        Raises:
            InvalidInputError: The model is in training mode, the patches are neither uint8 nor floating, or ``out`` is
                not made for these images.
            GridError: The patches are not those of the grids.
        """
        if self.training:
            raise InvalidInputError(
                "this forward is inference-only and works in place; call model.eval() first", param="training"
            )
        if out is not None:
            self._check_out(out, meta, dtype)
        hidden_LD = self.embed(patches_LC, meta)
        (self.vision_tower.encoder if blocks is None else blocks)(hidden_LD, meta)
        return self.finish(hidden_LD, meta, dtype, out)

    @torch.no_grad()
    def embed(self, patches_LC: torch.Tensor, meta: Metadata) -> torch.Tensor:
        """What comes before the blocks: patches projected to the tower's width, positions added.

        Args:
            patches_LC: As for ``forward``.
            meta: What ``prepare`` made for these images.

        Returns:
            hidden_LD in the tower's dtype.

        Raises:
            InvalidInputError: The patches are neither uint8 nor floating.
            GridError: The patches are not those of the grids.
        """
        patch_embed = self.vision_tower.patch_embed
        if meta.positions is not None:
            meta.positions.watch([patch_embed.pos_emb.weight], self.moves)
        hidden_LD: torch.Tensor = patch_embed(as_patches(patches_LC, meta.patches), meta)
        return hidden_LD

    @torch.no_grad()
    def finish(
        self,
        hidden_LD: torch.Tensor,
        meta: Metadata,
        dtype: torch.dtype | None = None,
        out: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """What comes after the blocks: patches merged and projected to the language model's width.

        Args:
            hidden_LD: What the blocks left.
            meta: What ``prepare`` made for these images.
            dtype: As for ``forward``.
            out: As for ``forward``.

        Returns:
            features_ME of each image, in order, each with storage of its own; or the tensors of ``out``.
        """
        merge, projector = self.vision_tower.encoder.merge, self.projector
        features, token = [], 0
        for image, grid in enumerate(meta.grids):
            index_M4 = meta.merge_index_M4[token : token + grid.tokens]
            features_ME = self._new_features(grid.tokens, dtype) if out is None else out[image]
            for start, stop in row_ranges(grid.tokens, min(meta.rows, TOKEN_ROWS)):
                projector(merge(hidden_LD, index_M4[start:stop], grid), features_ME[start:stop])
            features.append(features_ME)
            token += grid.tokens
        return features

    @torch.no_grad()
    def project(
        self, merged_MK: torch.Tensor, rows: int = TOKEN_ROWS, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The projector alone, for features that come from somewhere else.

        Args:
            merged_MK: (M, 4D) or (M, 4, D), any floating dtype; converted chunk by chunk, and only where it is not
                the projector's own.
            rows: Rows of a chunk at most.
            dtype: Dtype of the result; None is the projector's.

        Returns:
            features_ME with storage of their own.
        """
        features_ME = self._new_features(merged_MK.shape[0], dtype)
        for start, stop in row_ranges(merged_MK.shape[0], rows):
            self.projector(merged_MK[start:stop].flatten(1), features_ME[start:stop])
        return features_ME

    def _check_out(self, out: Sequence[torch.Tensor], meta: Metadata, dtype: torch.dtype | None) -> None:
        shapes = [(grid.tokens, self.config.text_hidden_size) for grid in meta.grids]
        if [tuple(each.shape) for each in out] != shapes:
            raise InvalidInputError(
                f"out has shapes {[tuple(each.shape) for each in out]}, these images give {shapes}", param="out"
            )
        for each in out:
            if each.device != self.device or not each.is_floating_point() or each.dtype != (dtype or each.dtype):
                raise InvalidInputError(
                    f"out is {each.dtype} on {each.device}: expected {dtype or 'floats'} on {self.device}", param="out"
                )

    def _new_features(self, tokens: int, dtype: torch.dtype | None) -> torch.Tensor:
        width = self.config.text_hidden_size
        return torch.empty(tokens, width, dtype=dtype or self.projector.dtype, device=self.device)
