"""How others do what is measured, each as code that runs and whose outputs are held against ours.

The two forms of rotary tables and of the projector are those of the towers inside inference engines before and after a
request was bounded; ``whole_request`` is a tower that takes all images of a request through each layer at once, given
our in-place rotary kernel, position table and norms, so that nothing but the order of work differs. transformers runs
as it is.

Shape suffixes: those of ``moonvit.model``; G patches of a grid.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moonvit.attention import rotate_, row_ranges
from moonvit.checkpoint import save_tensors
from moonvit.families import VisionConfig, config_dicts
from moonvit.grids import Grid
from moonvit.model import Block, Projector, VisionModel

SIDE = 512
"""Side of the grid that official towers keep a rotary table for."""


# ---- rotary tables --------------------------------------------------------------------------------------------------


def grid_factors(h: int, w: int, head_dim: int, device: str = "cpu") -> torch.Tensor:
    """Rotary factors of every patch of a grid, by the official formula.

    Args:
        h: Patch rows.
        w: Patch columns.
        head_dim: Width H of a head.
        device: Where.

    Returns:
        complex64 (h, w, H / 2).
    """
    patch_G = torch.arange(h * w, device=device).float()
    column_G, row_G = patch_G % w, torch.div(patch_G, w, rounding_mode="floor")
    frequencies = 1.0 / (10000.0 ** (torch.arange(0, head_dim, 4, device=device).float() / head_dim))
    angles = torch.outer(column_G, frequencies), torch.outer(row_G, frequencies)
    factors = [torch.polar(torch.ones_like(angle), angle) for angle in angles]
    return torch.stack(factors, dim=-1).view(h, w, -1)


def full_grid(grids: Sequence[Grid], head_dim: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of a request, gathered from the table of the largest grid there can be.

    Args:
        grids: Images.
        head_dim: Width H of a head.
        device: Where.

    Returns:
        Factors (L, H / 2), and the table, which such towers keep.
    """
    table = grid_factors(SIDE, SIDE, head_dim, device)
    return torch.cat([table[:h, :w].flatten(0, 1).repeat(t, 1) for t, h, w in grids]), table


def request_sized(grids: Sequence[Grid], head_dim: int, device: str = "cpu") -> torch.Tensor:
    """Factors of a request, made for its own grids alone.

    Args:
        grids: Images.
        head_dim: Width H of a head.
        device: Where.

    Returns:
        Factors (L, H / 2).
    """
    return torch.cat([grid_factors(h, w, head_dim, device).flatten(0, 1).repeat(t, 1) for t, h, w in grids])


# ---- projectors -----------------------------------------------------------------------------------------------------


def project(projector: Projector, merged_MK: torch.Tensor, rank: int = 0, ranks: int = 1) -> torch.Tensor:
    """The projector, or one tensor-parallel rank of it, on all rows at once.

    Args:
        projector: Its weights.
        merged_MK: Merged patches (M, 4D).
        rank: Which part of the inner width.
        ranks: In how many parts it is cut.

    Returns:
        features_ME; of several ranks, the summand of this one, which a norm can only follow once they are added.
    """
    first, last = projector.linears
    part = first.out_features // ranks
    some = slice(rank * part, (rank + 1) * part)
    x = merged_MK
    if projector.pre_norm is not None:
        x = projector.pre_norm(torch.unflatten(x, -1, (4, -1))).flatten(1)
    x = F.linear(x, first.weight[some], None if first.bias is None else first.bias[some])
    x = F.gelu(x)
    x = F.linear(x, last.weight[:, some], last.bias if rank == 0 else None)
    if projector.post_norm is not None and ranks == 1:
        projector.post_norm(x, out=x)
    return x


def concatenated(projector: Projector, merged: Sequence[torch.Tensor], **part: int) -> list[torch.Tensor]:
    """Features of all images from one call; each is a view of one storage.

    Args:
        projector: Its weights.
        merged: (M, 4D) of each image.
        **part: ``rank`` and ``ranks``, as ``project`` takes them.

    Returns:
        Features of each image.
    """
    features = project(projector, torch.cat(list(merged)), **part)
    return list(torch.split(features, [len(rows) for rows in merged]))


def per_image(projector: Projector, merged: Sequence[torch.Tensor], **part: int) -> list[torch.Tensor]:
    """Features of all images, from a call for each.

    Args:
        projector: Its weights.
        merged: (M, 4D) of each image.
        **part: ``rank`` and ``ranks``, as ``project`` takes them.

    Returns:
        Features of each image.
    """
    return [project(projector, rows, **part) for rows in merged]


# ---- a tower that takes a request at once ---------------------------------------------------------------------------


@torch.no_grad()
def whole_request(model: VisionModel, patches_LC: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
    """Features of a request by a tower that holds every activation for all its rows.

    Args:
        model: Its weights.
        patches_LC: uint8 pixels (L, 588).
        grids: Images.

    Returns:
        Features (M, E) of each image, views of one storage.
    """
    tower, meta = model.vision_tower, model.prepare(grids)
    embed = tower.patch_embed
    pixels_LC = patches_LC.to(model.dtype).div_(127.5).sub_(1.0)
    hidden_LD = F.linear(pixels_LC, embed.proj.weight.flatten(1), embed.proj.bias)
    del pixels_LC
    embed.pos_emb.add_to_(hidden_LD, meta)
    cis_LC = meta.rotary.cis(0, meta.patches)
    for block in tower.encoder.blocks:
        assert isinstance(block, Block)
        hidden_LD += block.wo(_attention(block, block.norm0(hidden_LD), cis_LC, meta.starts))
        hidden_LD += _mlp(block, block.norm1(hidden_LD))
    merged, token = [], 0
    for grid in meta.grids:
        merged.append(tower.encoder.merge(hidden_LD, meta.merge_index_M4[token : token + grid.tokens], grid))
        token += grid.tokens
    return concatenated(model.projector, merged)


def _attention(block: Block, x_LD: torch.Tensor, cis_LC: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    qkv = torch.unflatten(block.wqkv(x_LD), -1, (3, block.heads, -1))
    for first, last in row_ranges(len(x_LD), 256):
        for part in (0, 1):
            rotate_(qkv[first:last, part], cis_LC[first:last])
    images = []
    for first, last in itertools.pairwise(starts):
        q, k, v = (qkv[first:last, part].transpose(0, 1)[None] for part in range(3))
        images.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
    return torch.cat(images)


def _mlp(block: Block, x: torch.Tensor) -> torch.Tensor:
    x = block.mlp.fc0(x)
    x = F.gelu(x, approximate="tanh")
    out: torch.Tensor = block.mlp.fc1(x)
    return out


# ---- transformers ---------------------------------------------------------------------------------------------------


def k25_config_dict(config: VisionConfig) -> dict[str, Any]:
    """A ``config.json`` in K2.5's schema, official and plain names side by side, with a tiny language model.

    Args:
        config: The vision part.

    Returns:
        JSON-able values.

    Raises:
        ConfigError: The configuration has a value that these files have no field for.
    """
    vision = config_dicts(config)[0]["vision_config"]
    plain = {name.removeprefix("vt_").removeprefix("init_"): value for name, value in vision.items()}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "float32",
        "tie_word_embeddings": False,
        "media_placeholder_token_id": 60,
        "projection_hidden_size": config.hidden_size,
        "vision_config": plain | vision,
        "text_config": {
            "model_type": "kimi_k2",
            "hidden_size": config.text_hidden_size,
            "intermediate_size": 8,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "vocab_size": 64,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    }


def write_k25_checkpoint(state: Mapping[str, torch.Tensor], config: VisionConfig, directory: Path) -> None:
    """Write a whole K2.5 checkpoint under official names: our vision weights and a random language model.

    Args:
        state: Vision weights.
        config: The vision part.
        directory: Where to; made if need be.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(k25_config_dict(config)))
    make: Any = AutoModelForCausalLM.from_config
    text = make(AutoConfig.from_pretrained(directory).text_config)
    tensors = {f"language_model.{name}": tensor.clone() for name, tensor in text.state_dict().items()}
    save_tensors({**tensors, **state}, directory / "model.safetensors", {"format": "pt"})


def load_transformers(directory: Path, dtype: str = "float32") -> Any:
    """The checkpoint in transformers' K2.5.

    Args:
        directory: What ``write_k25_checkpoint`` wrote.
        dtype: Of all weights.

    Returns:
        The model, in evaluation mode.

    Raises:
        AssertionError: A weight has not found its place.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    load: Any = AutoModelForImageTextToText.from_pretrained
    model, report = load(directory, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@torch.inference_mode()
def transformers_features(model: nn.Module, pixels: torch.Tensor, grids: torch.Tensor) -> Sequence[torch.Tensor]:
    """Features of transformers, all images in one call, as its own generation makes them.

    Args:
        model: What ``load_transformers`` loaded.
        pixels: Normalised (L, 3, 14, 14).
        grids: int64 (images, 3).

    Returns:
        Features of each image, views of one storage.
    """
    features: Sequence[torch.Tensor] = model.get_image_features(pixels, grids).pooler_output  # type: ignore[operator]
    return features
