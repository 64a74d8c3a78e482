"""The plain differentiable form of the demo model: the same modules and names as the official checkpoint.

``moonvit.model`` is in place and inference-only; this is what it must equal, written for gradients. Batches hold
pictures of one grid, so attention needs no mask in the tower, and text is padded on the right, so the causal mask is
enough in the decoder.

Shape suffixes: B pictures, L patches of a picture, D tower width, N heads, H head dim, M merged tokens of a picture,
K = 4D, S sequences, T tokens of a sequence, E language width, X experts, C = 588.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rope_tables(h: int, w: int, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cos and sin of the 2-D rotary embedding.

    Args:
        h: Patch rows.
        w: Patch columns.
        head_dim: Width of a head.
        theta: Base.

    Returns:
        Two float32 tensors (h * w, head_dim), for ``rotate``; pair 2i turns with the column, 2i + 1 with the row.
    """
    freqs = 1.0 / theta ** (torch.arange(0, head_dim, 4).float() / head_dim)
    y, x = torch.meshgrid(torch.arange(h).float(), torch.arange(w).float(), indexing="ij")
    angles = torch.stack([x.reshape(-1, 1) * freqs, y.reshape(-1, 1) * freqs], dim=-1).reshape(h * w, head_dim // 2)
    return spread(angles)


def spread(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cos and signed sin of each pair's angle, once for each of its two values.

    Args:
        angles: (L, H / 2).

    Returns:
        Two tensors (L, H).
    """
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([cos, cos], -1).flatten(-2), torch.stack([-sin, sin], -1).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn consecutive pairs of the last dimension.

    Args:
        x: (..., L, H).
        cos: (L, H), from ``spread``.
        sin: (L, H).

    Returns:
        The same shape and dtype as x.
    """
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x * cos + swapped * sin


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """Softmax attention, written out for short sequences, where it is several times faster on a CPU.

    Args:
        q: (..., L, H).
        k: (..., L, H).
        v: (..., L, V); V may differ from H.
        seen: bool, broadcastable to (..., L, L): which keys a query sees; None is all.

    Returns:
        (..., L, V).
    """
    length = q.shape[-2]
    if length > 1200:
        pad = q.shape[-1] - v.shape[-1]
        return F.scaled_dot_product_attention(q, k, F.pad(v, (0, pad)), attn_mask=seen)[..., : v.shape[-1]]
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if seen is not None:
        scores = scores + torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, float("-inf"))
    return scores.softmax(-1) @ v


class Mlp(nn.Module):
    """fc1(gelu_tanh(fc0(x)))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(width, inner)
        self.fc1 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm block of the tower."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0 = nn.LayerNorm(width)
        self.norm1 = nn.LayerNorm(width)
        self.wqkv = nn.Linear(width, 3 * width)
        self.wo = nn.Linear(width, width)
        self.mlp = Mlp(width, inner)

    def forward(self, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.norm0(x_BLD)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x_BLD = x_BLD + self.wo(out.transpose(1, 2).flatten(2))
        return x_BLD + self.mlp(self.norm1(x_BLD))


class PosEmb(nn.Module):
    """The learned table, resampled to a grid."""

    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(height, width, dim))

    def forward(self, h: int, w: int) -> Tensor:
        table = self.weight.float().permute(2, 0, 1)[None]
        if tuple(table.shape[-2:]) != (h, w):
            table = F.interpolate(table, size=(h, w), mode="bicubic", align_corners=False)
        return table[0].flatten(1).T.to(self.weight.dtype)


class PatchEmbed(nn.Module):
    """A linear over the flattened patch plus its position."""

    def __init__(self, dim: int, height: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, 14, 14)
        self.pos_emb = PosEmb(height, width, dim)


class Encoder(nn.Module):
    """The blocks and the last norm."""

    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.final_layernorm = nn.LayerNorm(width)


class Tower(nn.Module):
    """MoonViT for still pictures of one grid."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        width, heads = vision["vt_hidden_size"], vision["vt_num_attention_heads"]
        self.head_dim = width // heads
        self.patch_embed = PatchEmbed(width, vision["init_pos_emb_height"], vision["init_pos_emb_width"])
        self.encoder = Encoder(vision["vt_num_hidden_layers"], width, heads, vision["vt_intermediate_size"])

    def forward(self, patches_BLC: Tensor, h: int, w: int) -> Tensor:
        weight = self.patch_embed.proj.weight
        x_BLD = F.linear(patches_BLC.to(weight.dtype), weight.flatten(1), self.patch_embed.proj.bias)
        x_BLD = x_BLD + self.patch_embed.pos_emb(h, w)
        cos, sin = (table.to(x_BLD.dtype) for table in rope_tables(h, w, self.head_dim))
        for block in self.encoder.blocks:
            x_BLD = block(x_BLD, cos, sin)
        x_BLD = self.encoder.final_layernorm(x_BLD)
        return x_BLD.unflatten(1, (h // 2, 2, w // 2, 2)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


class Projector(nn.Module):
    """LayerNorm each patch, then two linears over four of them."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(width)
        self.proj = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, out))

    def forward(self, merged_BM4D: Tensor) -> Tensor:
        return self.proj(self.pre_norm(merged_BM4D).flatten(2))


class _RmsFunction(torch.autograd.Function):
    """RMSNorm whose statistics are float32 and whose passes over the data stay in the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
        scale = torch.rsqrt(square / x.shape[-1] + eps)
        normed = x * scale.to(x.dtype)
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        normed, weight, scale = ctx.saved_tensors
        (grad,) = grads
        product = grad * normed
        inner = grad * weight
        mean = (product * weight).mean(-1, keepdim=True)
        return (inner - normed * mean) * scale.to(grad.dtype), product.flatten(0, -2).sum(0), None


class Rms(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RmsFunction.apply(x, self.weight, self.eps)


class Attention(nn.Module):
    """Multi-head latent attention with the latents expanded."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.nope, self.rope, self.v = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        self.rank = c["kv_lora_rank"]
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.q_a_proj = nn.Linear(width, c["q_lora_rank"], bias=False)
        self.q_a_layernorm = Rms(c["q_lora_rank"], 1e-6)
        self.q_b_proj = nn.Linear(c["q_lora_rank"], self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = Rms(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v, width, bias=False)
        self.eps = eps

    def forward(self, x_STE: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_STE))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, key = self.kv_a_proj_with_mqa(x_STE).split([self.rank, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.v], dim=-1)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([q_nope, rotate(q_rope, cos, sin)], -1)
        k_rope = rotate(key[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        k = torch.cat([k_nope, k_rope], -1)
        return self.o_proj(attend(q, k, v, seen).transpose(1, 2).flatten(2))


class Ffn(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """The router: sigmoid scores, chosen with a balancing bias that has no gradient."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width) / math.sqrt(width))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Moe(nn.Module):
    """Routed and shared experts. Every expert sees every token here: at this size that is faster than gathering."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.top, self.scale = c["num_experts_per_tok"], c["routed_scaling_factor"]
        self.gate = Gate(c["hidden_size"], c["n_routed_experts"])
        self.experts = nn.ModuleList(
            Ffn(c["hidden_size"], c["moe_intermediate_size"]) for _ in range(c["n_routed_experts"])
        )
        self.shared_experts = Ffn(c["hidden_size"], c["moe_intermediate_size"] * c["n_shared_experts"])

    def forward(self, x_STE: Tensor) -> Tensor:
        scores = F.linear(x_STE.float(), self.gate.weight.float()).sigmoid()
        chosen = (scores.detach() + self.gate.e_score_correction_bias.float()).topk(self.top, dim=-1).indices
        picked = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            load = picked.mean(dim=(0, 1))
            with torch.no_grad():
                self.gate.e_score_correction_bias += 1e-3 * torch.sign(load.mean() - load)
        weights = scores * picked
        weights = (weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale).to(x_STE.dtype)
        gate = torch.cat([expert.gate_proj.weight for expert in self.experts])
        up = torch.cat([expert.up_proj.weight for expert in self.experts])
        down = torch.cat([expert.down_proj.weight for expert in self.experts], dim=1)
        inner = F.silu(F.linear(x_STE, gate)) * F.linear(x_STE, up)
        inner = (inner.unflatten(-1, (len(self.experts), -1)) * weights[..., None]).flatten(-2)
        return self.shared_experts(x_STE) + F.linear(inner, down)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, c: dict[str, Any], index: int) -> None:
        super().__init__()
        self.input_layernorm = Rms(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = Rms(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = Attention(c)
        dense = index < c["first_k_dense_replace"]
        self.mlp = Ffn(c["hidden_size"], c["intermediate_size"]) if dense else Moe(c)

    def forward(self, x_STE: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        x_STE = x_STE + self.self_attn(self.input_layernorm(x_STE), cos, sin, seen)
        return x_STE + self.mlp(self.post_attention_layernorm(x_STE))


class Decoder(nn.Module):
    """Embedding, layers and the last norm of DeepSeek-V3."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, index) for index in range(c["num_hidden_layers"]))
        self.norm = Rms(c["hidden_size"], c["rms_norm_eps"])


class LanguageModel(nn.Module):
    """The decoder and its head, under their official names."""

    def __init__(self, c: dict[str, Any]) -> None:
        super().__init__()
        self.rope, self.theta = c["qk_rope_head_dim"], c["rope_theta"]
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, x_STE: Tensor, turns_ST: Tensor, positions_ST: Tensor) -> Tensor:
        freqs = 1.0 / self.theta ** (torch.arange(0, self.rope, 2).float() / self.rope)
        angles = positions_ST[:, None, :, None].float() * freqs
        cos, sin = (table.to(x_STE.dtype) for table in spread(angles))
        keys, queries = turns_ST[:, None, None, :], turns_ST[:, None, :, None]
        seen = ((keys == 0) | (keys == queries)).tril_()
        for layer in self.model.layers:
            x_STE = layer(x_STE, cos, sin, seen)
        return self.model.norm(x_STE)


def cosine_filters(width: int) -> Tensor:
    """First filters of the patch embedding: low cosines of brightness and of two colour differences.

    Raw pixels are nearly all mean; cosines, scaled to about one, spare the first thousand steps of finding that out.

    Args:
        width: Tower width D, three times a number of cosines.

    Returns:
        float32 (D, 3 * 14 * 14).
    """
    k, x = torch.arange(14.0)[:, None], torch.arange(14.0)[None]
    basis = torch.cos(math.pi * k * (x + 0.5) / 14) * torch.where(k == 0, (1 / 14) ** 0.5, (2 / 14) ** 0.5)
    order = sorted(((u, v) for u in range(14) for v in range(14)), key=lambda uv: (uv[0] + uv[1], uv))
    waves = torch.stack([torch.outer(basis[u], basis[v]) for u, v in order[: width // 3]])
    scale = torch.full((len(waves),), 0.35)
    scale[0] = 0.05
    colours = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
    colours = colours / colours.norm(dim=1, keepdim=True)
    filters = colours[:, None, :, None, None] * (waves * scale[:, None, None])[None, :, None]
    return filters.flatten(2).flatten(0, 1)


def smooth_positions(height: int, width: int, dim: int, strength: float = 0.3) -> Tensor:
    """First position table: slow waves along both axes, each spread over all channels by random signs.

    A table of noise tells nothing about where a patch is until each of its entries is learned, and a grid of another
    size reads other entries; slow waves say it at once, for every size.

    Args:
        height: Rows of the table.
        width: Columns.
        dim: Tower width D.
        strength: Height of one wave.

    Returns:
        float32 (height, width, D).
    """
    y, x = ((torch.arange(float(n)) + 0.5) / n * math.pi for n in (height, width))
    waves = [torch.cos(a * y)[:, None] * torch.cos(b * x) for a in range(4) for b in range(4) if 0 < a + b < 4]
    signs = torch.randint(0, 2, (len(waves), dim)) * 2.0 - 1.0
    return strength * torch.einsum("khw,kd->hwd", torch.stack(waves), signs)


def look_at_neighbours(block: Block, index: int, strength: float = 4.5) -> None:
    """Bias the heads of a block towards the patch to the left, to the right, and above or below.

    Two constant vectors in q and k, turned by RoPE, meet in a score that depends on the distance alone; turning one of
    them beforehand moves its peak. A tower that starts out looking around learns glyphs several times sooner.

    Args:
        block: Changed in place.
        index: Its number; even blocks look up, odd ones down.
        strength: Size of the vectors.
    """
    width = block.wo.weight.shape[0]
    head_dim = width // block.heads
    freqs = 10000.0 ** (-torch.arange(0, head_dim, 4).float() / head_dim)
    shifts = [(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0 if index % 2 == 0 else 1.0)]
    bias = torch.zeros(2, block.heads, head_dim // 4, 2, 2)
    for head in range(block.heads):
        dx, dy = shifts[head % 3]
        for number in range(4):
            for axis, shift in enumerate((dx, dy)):
                angle = -freqs[number] * shift
                bias[0, head, number, axis, 0] = strength
                bias[1, head, number, axis, 0] = strength * math.cos(angle)
                bias[1, head, number, axis, 1] = strength * math.sin(angle)
    block.wqkv.bias[: 2 * width].copy_(bias.flatten())


class DemoModel(nn.Module):
    """Tower, projector and decoder, in the K2.5 schema.

    Args:
        config: The ``config.json`` of the model.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.vision_tower = Tower(config["vision_config"])
        width = config["vision_config"]["vt_hidden_size"]
        self.mm_projector = Projector(width, config["text_config"]["hidden_size"])
        self.language_model = LanguageModel(config["text_config"])
        self.placeholder = config["media_placeholder_token_id"]
        self.reset()

    def reset(self) -> None:
        """Draw the weights: narrow normals, and zeros where a branch joins the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and "pos_emb" not in name:
                fan_in = parameter[0].numel()
                nn.init.normal_(parameter, std=0.02 if "embed_tokens" in name else 0.7 / math.sqrt(fan_in))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            if name.endswith(("wo.weight", "fc1.weight", "o_proj.weight", "down_proj.weight", "lm_head.weight")):
                nn.init.normal_(parameter, std=0.25 / math.sqrt(parameter.shape[1]))
        with torch.no_grad():
            tower = self.vision_tower
            proj, table = tower.patch_embed.proj, tower.patch_embed.pos_emb.weight
            table.copy_(smooth_positions(*table.shape))
            proj.weight.copy_(cosine_filters(proj.weight.shape[0]).view_as(proj.weight))
            for index, block in enumerate(tower.encoder.blocks[:-2]):
                look_at_neighbours(block, index)

    def features(self, patches_BLC: Tensor, h: int, w: int) -> Tensor:
        """Language-width features of pictures of one grid.

        Args:
            patches_BLC: Normalised patches.
            h: Patch rows.
            w: Patch columns.

        Returns:
            (B, M, E).
        """
        return self.mm_projector(self.vision_tower(patches_BLC, h, w))

    def hidden(self, ids_ST: Tensor, features_ME: Tensor, turns_ST: Tensor, positions_ST: Tensor) -> Tensor:
        """Decoder states of sequences whose placeholders take the features in order.

        Args:
            ids_ST: Token ids, padded on the right.
            features_ME: Features of all pictures of the batch, in the order of the placeholders.
            turns_ST: Tokens are seen by later ones of the same number, those of number 0 by all later ones.
            positions_ST: Where each token stands, for RoPE.

        Returns:
            (S, T, E), normed.
        """
        x_STE = self.language_model.model.embed_tokens(ids_ST)
        mask = (ids_ST == self.placeholder)[..., None]
        x_STE = x_STE.masked_scatter(mask, features_ME.to(x_STE.dtype))
        return self.language_model(x_STE, turns_ST, positions_ST)
