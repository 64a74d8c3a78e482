"""A slow tower and projector written from the published formulas alone, one image at a time, nothing shared with src.

Full position tables, full score matrices, explicit softmax, plain complex numbers. In float64 it is what every other
implementation is held against; in float32, bfloat16 or float16 it is "plain PyTorch in that dtype", with the
conventions of the official code: rotary in float32, positions in the weights' dtype, softmax through SDPA.

Shape suffixes: L patches of one image, D tower width, N heads, H head dimension, M tokens, K = 4D, E language width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F


def rotary_factors(h: int, w: int, head_dim: int, theta: float, dtype: torch.dtype) -> torch.Tensor:
    """exp(i * angle) of every patch, (h * w, H / 2): column and row angles taking turns, column first."""
    frequency = theta ** (-torch.arange(0, head_dim, 4, dtype=dtype) / head_dim)
    row = torch.arange(h).repeat_interleave(w).to(dtype)
    column = torch.arange(w).repeat(h).to(dtype)
    angle = torch.stack((column[:, None] * frequency, row[:, None] * frequency), dim=-1).reshape(h * w, -1)
    return torch.polar(torch.ones_like(angle), angle)


def full_rotary_table(
    head_dim: int, side: int = 512, theta: float = 10000.0, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The table the official towers keep: complex64 (side, side, H / 2)."""
    position = torch.arange(side * side, device=device).float()
    frequency = 1.0 / (theta ** (torch.arange(0, head_dim, 4, device=device)[: head_dim // 4].float() / head_dim))
    column = torch.outer(position % side, frequency)
    row = torch.outer(torch.div(position, side, rounding_mode="floor"), frequency)
    factors = [torch.polar(torch.ones_like(angle), angle) for angle in (column, row)]
    return torch.stack(factors, dim=-1).reshape(side, side, -1)


def rotate(x_LNH: torch.Tensor, factors_LC: torch.Tensor) -> torch.Tensor:
    """Turn consecutive pairs of values by the angle of their patch."""
    wide = x_LNH.to(factors_LC.real.dtype)
    turned = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2)) * factors_LC[:, None]
    return torch.view_as_real(turned).flatten(-2).to(x_LNH.dtype)


def positions(table: torch.Tensor, t: int, h: int, w: int, mode: str) -> torch.Tensor:
    """What is added to the embedded patches of one image, (t * h * w, D)."""
    if tuple(table.shape[:2]) == (h, w):
        plane = table.flatten(0, 1)
    else:
        plane = F.interpolate(table.permute(2, 0, 1)[None], size=(h, w), mode=mode, align_corners=False)
        plane = plane[0].flatten(1).T
    if t == 1:
        return plane
    width = table.shape[-1]
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    omega = 10000.0 ** (-torch.arange(width // 2, dtype=dtype) / (width / 2))
    angle = torch.arange(t, dtype=dtype)[:, None] * omega
    frame = torch.cat((angle.sin(), angle.cos()), dim=1)
    return (plane[None] + frame[:, None]).flatten(0, 1)


def norm(x: torch.Tensor, weights: Mapping[str, torch.Tensor], name: str, kind: str, eps: float) -> torch.Tensor:
    """LayerNorm or RMSNorm by their definition."""
    if x.dtype in (torch.bfloat16, torch.float16):
        if kind == "rmsnorm":
            return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)
    if kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every patch of the image sees every other; inputs and result (L, N, H)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if q.dtype in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).transpose(0, 1)


def features(
    state: Mapping[str, torch.Tensor],
    config: Any,
    patches: torch.Tensor,
    grids: Sequence[tuple[int, int, int]],
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """Features of each image.

    Args:
        state: Weights under official names.
        config: Anything with the fields of ``VisionConfig``.
        patches: Normalised floats (L, 588).
        grids: (t, h, w) of each image.
        dtype: What to compute in.
    """
    weights = {name: tensor.to(dtype) for name, tensor in state.items()}
    head_dim = config.qkv_size // config.num_heads
    kind, eps = config.norm, config.norm_eps

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    results, start = [], 0
    for t, h, w in grids:
        pixels = patches[start : start + t * h * w].to(dtype)
        start += t * h * w
        x = F.linear(
            pixels,
            weights["vision_tower.patch_embed.proj.weight"].flatten(1),
            weights.get("vision_tower.patch_embed.proj.bias"),
        )
        table = weights["vision_tower.patch_embed.pos_emb.weight"]
        x = x + positions(table, t, h, w, config.pos_emb_mode).to(dtype)
        rotary_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        factors = rotary_factors(h, w, head_dim, config.rope_theta, rotary_dtype).repeat(t, 1)
        for index in range(config.num_layers):
            block = f"vision_tower.encoder.blocks.{index}"
            qkv = linear(norm(x, weights, f"{block}.norm0", kind, eps), f"{block}.wqkv")
            q, k, v = qkv.view(len(x), 3, config.num_heads, head_dim).unbind(1)
            mixed = attention(rotate(q, factors), rotate(k, factors), v)
            x = x + linear(mixed.flatten(1), f"{block}.wo")
            inner = linear(norm(x, weights, f"{block}.norm1", kind, eps), f"{block}.mlp.fc0")
            x = x + linear(F.gelu(inner, approximate="tanh"), f"{block}.mlp.fc1")
        x = norm(x, weights, "vision_tower.encoder.final_layernorm", kind, eps)
        x = x.view(t, h // 2, 2, w // 2, 2, -1).transpose(2, 3).mean(dim=0)
        x = x.reshape((h // 2) * (w // 2), 4, -1)
        if config.family == "kimi-vl":
            projector, first, last = "multi_modal_projector", "linear_1", "linear_2"
        else:
            projector, first, last = "mm_projector", "proj.0", "proj.2"
        if config.projector == "pre_norm":
            x = norm(x, weights, f"{projector}.pre_norm", "layernorm", config.projector_norm_eps)
        x = linear(F.gelu(linear(x.flatten(1), f"{projector}.{first}")), f"{projector}.{last}")
        if config.projector == "post_norm":
            x = norm(x, weights, f"{projector}.post_norm", "rmsnorm", config.projector_norm_eps)
        results.append(x)
    return results


def max_relative_error(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest difference anywhere over the largest value anywhere, the worst of all images."""
    assert len(ours) == len(theirs)
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        worst = max(worst, ((a.double() - b.double()).abs().max() / b.double().abs().max()).item())
    return worst
