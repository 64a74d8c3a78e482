"""A slow tower and projector from the published formulas alone: what ``model`` must equal, sharing nothing with it.

Full position tables, full score matrices, explicit softmax, plain complex numbers, one image at a time. In float64 it
is what every other implementation is held against; in float32, bfloat16 or float16 it is "plain PyTorch in that dtype",
with the conventions of the official code: rotary in float32, positions in the weights' dtype, softmax through SDPA.

Shape suffixes: L patches of one image, C = 588, D tower width, N heads, H head dimension, F = H / 2, M tokens, K = 4D,
E language width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

from moonvit.families import VisionConfig


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


def rotate(x_LNH: torch.Tensor, factors_LF: torch.Tensor) -> torch.Tensor:
    """Turn consecutive pairs of values by the angle of their patch."""
    wide = x_LNH.to(factors_LF.real.dtype)
    turned = torch.view_as_complex(wide.reshape(*wide.shape[:-1], -1, 2)) * factors_LF[:, None]
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


def norm(x: torch.Tensor, get: Callable[[str], torch.Tensor], name: str, kind: str, eps: float) -> torch.Tensor:
    """LayerNorm or RMSNorm by their definition, with the weights that ``get`` gives."""
    if x.dtype in (torch.bfloat16, torch.float16):
        if kind == "rmsnorm":
            return F.rms_norm(x, x.shape[-1:], get(f"{name}.weight"), eps)
        return F.layer_norm(x, x.shape[-1:], get(f"{name}.weight"), get(f"{name}.bias"), eps)
    if kind == "rmsnorm":
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * get(f"{name}.weight")
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * get(f"{name}.weight") + get(f"{name}.bias")


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every patch of the image sees every other; inputs and result (L, N, H)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    if q.dtype in (torch.bfloat16, torch.float16):
        return F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1)
    # A head at a time: the scores of all of them would be the largest thing by far.
    heads = [(a @ b.T / a.shape[-1] ** 0.5).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
    return torch.stack(heads, dim=1)


def stages(
    state: Mapping[str, torch.Tensor],
    config: VisionConfig,
    patches_LC: torch.Tensor,
    grid: tuple[int, int, int],
    dtype: torch.dtype = torch.float64,
) -> Iterator[tuple[str, torch.Tensor]]:
    """One image, stage by stage.

    Args:
        state: Weights under official names; each is cast when it is needed and no sooner.
        config: The model.
        patches_LC: Normalised floats (L, 588).
        grid: (t, h, w).
        dtype: What to compute in.

    Yields:
        ``"embed"`` (L, D) with positions, ``"block 0"`` and so on (L, D), ``"merge"`` (M, K) normed and averaged over
        frames, ``"projector"`` (M, E).
    """
    t, h, w = grid
    head_dim = config.qkv_size // config.num_heads
    kind, eps = config.norm, config.norm_eps

    def get(name: str) -> torch.Tensor:
        return state[name].to(dtype)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = get(f"{name}.bias") if f"{name}.bias" in state else None
        return F.linear(x, get(f"{name}.weight").flatten(1), bias)

    x = linear(patches_LC.to(dtype), "vision_tower.patch_embed.proj")
    table = get("vision_tower.patch_embed.pos_emb.weight")
    x = x + positions(table, t, h, w, config.pos_emb_mode).to(dtype)
    yield "embed", x
    rotary_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    factors = rotary_factors(h, w, head_dim, config.rope_theta, rotary_dtype).repeat(t, 1)
    for index in range(config.num_layers):
        block = f"vision_tower.encoder.blocks.{index}"
        qkv = linear(norm(x, get, f"{block}.norm0", kind, eps), f"{block}.wqkv")
        q, k, v = qkv.view(len(x), 3, config.num_heads, head_dim).unbind(1)
        mixed = attention(rotate(q, factors), rotate(k, factors), v)
        x = x + linear(mixed.flatten(1), f"{block}.wo")
        inner = linear(norm(x, get, f"{block}.norm1", kind, eps), f"{block}.mlp.fc0")
        x = x + linear(F.gelu(inner, approximate="tanh"), f"{block}.mlp.fc1")
        yield f"block {index}", x
    x = norm(x, get, "vision_tower.encoder.final_layernorm", kind, eps)
    x = x.view(t, h // 2, 2, w // 2, 2, -1).transpose(2, 3).mean(dim=0)
    x = x.reshape((h // 2) * (w // 2), 4, -1)
    yield "merge", x.flatten(1)
    if config.family == "kimi-vl":
        projector, first, last = "multi_modal_projector", "linear_1", "linear_2"
    else:
        projector, first, last = "mm_projector", "proj.0", "proj.2"
    if config.projector == "pre_norm":
        x = norm(x, get, f"{projector}.pre_norm", "layernorm", config.projector_norm_eps)
    x = linear(F.gelu(linear(x.flatten(1), f"{projector}.{first}")), f"{projector}.{last}")
    if config.projector == "post_norm":
        x = norm(x, get, f"{projector}.post_norm", "rmsnorm", config.projector_norm_eps)
    yield "projector", x


def features(
    state: Mapping[str, torch.Tensor],
    config: VisionConfig,
    patches: torch.Tensor,
    grids: Sequence[tuple[int, int, int]],
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """Features of each image.

    Args:
        state: Weights under official names.
        config: The model.
        patches: Normalised floats (L, 588), images one behind the other.
        grids: (t, h, w) of each image.
        dtype: What to compute in.

    Returns:
        (M, E) of each image, in ``dtype``.
    """
    rows = [t * h * w for t, h, w in grids]
    results = []
    for grid, part in zip(grids, torch.split(patches, rows), strict=True):
        *_, (_, last) = stages(state, config, part, grid, dtype)
        results.append(last)
    return results


def max_relative_error(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    """Largest difference anywhere over the largest value anywhere, the worst of all images.

    Args:
        ours: Tensors.
        theirs: Tensors of the same shapes, which the difference is measured by.

    Returns:
        The error; NaN where either holds one.

    Raises:
        ValueError: The shapes differ.
    """
    errors = []
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            raise ValueError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be compared")
        errors.append((a.double() - b.double()).abs().max() / b.double().abs().max())
    return float(torch.stack(errors).max().detach())  # the builtin max would lose a NaN
