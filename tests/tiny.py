"""Tiny checkpoints with random weights, in the official schemas of Kimi-K2.5 and Kimi-VL, file for file.

Names, shapes and dtypes are written out here and not taken from the package, so that what loads them is tested against
something else.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from train.export import preprocessor_config
from train.vocabulary import SPECIALS

WORDS = ["user", "assistant", "system", "image", " the", " picture", " red", " what", " is", "hello", " world", " Kimi"]
VL_SPECIALS = {k: "<|media_start|>" if k == 18 else v for k, v in SPECIALS.items() if k not in (22, 23)}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
GRID_SIDE = 8
WIDTH = 64
YARN = {
    "type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

Form = Literal["tiktoken", "json"]
Tensors = dict[str, torch.Tensor]


# ---- vocabulary -----------------------------------------------------------------------------------------------------


def ranks() -> list[bytes]:
    """The base vocabulary: all bytes, then words after their own beginnings, so that merging reaches them."""
    tokens = [bytes([value]) for value in range(256)]
    for word in WORDS:
        for length in range(2, len(word) + 1):
            beginning = word[:length].encode()
            if beginning not in tokens:
                tokens.append(beginning)
    return tokens


BASE = len(ranks())
VOCABULARY = BASE + 256


def special(name: str) -> int:
    """Id of a special token of K2.5."""
    return BASE + next(offset for offset, known in SPECIALS.items() if known == name)


def write_tokenizer(folder: Path, specials: Mapping[int, str] = SPECIALS) -> None:
    """``tiktoken.model`` and ``tokenizer_config.json``."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks())]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(BASE + offset): {"content": name, "special": True} for offset, name in specials.items()}
    write_json(
        folder / "tokenizer_config.json", {"added_tokens_decoder": added, "tokenizer_class": "TikTokenTokenizer"}
    )


# ---- configurations -------------------------------------------------------------------------------------------------


def text_config(**changes: Any) -> dict[str, Any]:
    """``text_config`` of a two-layer decoder: the first layer dense, the second with experts."""
    return {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        "max_position_embeddings": 1024,
        "hidden_act": "silu",
        "num_nextn_predict_layers": 0,
        **changes,
    }


def k25_config(**text: Any) -> dict[str, Any]:
    """``config.json`` in the schema of K2.5, with the few keys by which transformers knows the same things."""
    sides = {"height": GRID_SIDE, "width": GRID_SIDE, "time": 4}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": BASE,
        "eos_token_id": BASE + 1,
        "pad_token_id": BASE + 255,
        "dtype": "float32",
        "ignore_index": -100,
        "media_placeholder_token_id": special("<|media_pad|>"),
        "image_token_id": special("<|media_pad|>"),
        "projection_hidden_size": VISION["hidden_size"],
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "vision_config": {
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": VISION["hidden_size"],
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "text_hidden_size": WIDTH,
            "video_attn_type": "spatial_temporal",
            **VISION,
            **{f"vt_{name}": value for name, value in VISION.items()},
            **{f"pos_emb_{side}": value for side, value in sides.items()},
            **{f"init_pos_emb_{side}": value for side, value in sides.items()},
        },
        "text_config": text_config(**text),
    }


def vl_config(**text: Any) -> dict[str, Any]:
    """``config.json`` in the schema of Kimi-VL-A3B: plain queries, no YaRN."""
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "bos_token_id": BASE,
        "eos_token_id": BASE + 1,
        "pad_token_id": BASE + 255,
        "ignore_index": -100,
        "media_placeholder_token_id": special("<|media_pad|>"),
        "tie_word_embeddings": False,
        "vision_config": {
            "model_type": "moonvit",
            "patch_size": 14,
            "init_pos_emb_height": GRID_SIDE,
            "init_pos_emb_width": GRID_SIDE,
            "merge_kernel_size": [2, 2],
            **VISION,
        },
        "text_config": text_config(
            model_type="deepseek_v3", q_lora_rank=None, rope_theta=800000.0, rope_scaling=None, **text
        ),
    }


K25_PREPROCESSOR = preprocessor_config()
VL_PREPROCESSOR = {
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "pad_input": True,
    "in_token_limit": 4096,
    "num_pooled_tokens": 1024,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


# ---- weights --------------------------------------------------------------------------------------------------------


def vision_shapes(projector: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Official names of a tower with biases, and of its projector."""
    d, i, k = VISION["hidden_size"], VISION["intermediate_size"], 4 * VISION["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (d, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (d,),
        "vision_tower.patch_embed.pos_emb.weight": (GRID_SIDE, GRID_SIDE, d),
        "vision_tower.encoder.final_layernorm.weight": (d,),
        "vision_tower.encoder.final_layernorm.bias": (d,),
    }
    for block in range(VISION["num_hidden_layers"]):
        stem = f"vision_tower.encoder.blocks.{block}"
        matrices = {"wqkv": (3 * d, d), "wo": (d, d), "mlp.fc0": (i, d), "mlp.fc1": (d, i)}
        for name, shape in matrices.items():
            shapes |= {f"{stem}.{name}.weight": shape, f"{stem}.{name}.bias": shape[:1]}
        for name in ("norm0", "norm1"):
            shapes |= {f"{stem}.{name}.weight": (d,), f"{stem}.{name}.bias": (d,)}
    for name, shape in ((projector["in"], (k, k)), (projector["out"], (WIDTH, k))):
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    shapes |= {f"{projector['norm']}.weight": (d,), f"{projector['norm']}.bias": (d,)}
    return shapes


def text_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Official names of a DeepSeek-V3 decoder."""
    width, heads = text["hidden_size"], text["num_attention_heads"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    q_rank, kv_rank = text["q_lora_rank"], text["kv_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (text["vocab_size"], width),
        "language_model.model.norm.weight": (width,),
        "language_model.lm_head.weight": (text["vocab_size"], width),
    }
    for layer in range(text["num_hidden_layers"]):
        stem = f"language_model.model.layers.{layer}"
        attention: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa": (kv_rank + rope, width),
            "kv_a_layernorm": (kv_rank,),
            "kv_b_proj": (heads * (nope + value), kv_rank),
            "o_proj": (width, heads * value),
        }
        if q_rank is None:
            attention["q_proj"] = (heads * (nope + rope), width)
        else:
            attention |= {"q_a_proj": (q_rank, width), "q_a_layernorm": (q_rank,)}
            attention["q_b_proj"] = (heads * (nope + rope), q_rank)
        shapes |= {f"{stem}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{stem}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        inner = {f"{stem}.mlp": text["intermediate_size"]}
        if layer >= text["first_k_dense_replace"]:
            shapes[f"{stem}.mlp.gate.weight"] = (text["n_routed_experts"], width)
            shapes[f"{stem}.mlp.gate.e_score_correction_bias"] = (text["n_routed_experts"],)
            expert = text["moe_intermediate_size"]
            inner = {f"{stem}.mlp.experts.{number}": expert for number in range(text["n_routed_experts"])}
            inner[f"{stem}.mlp.shared_experts"] = expert * text["n_shared_experts"]
        for name, size in inner.items():
            shapes |= {f"{name}.gate_proj.weight": (size, width), f"{name}.up_proj.weight": (size, width)}
            shapes[f"{name}.down_proj.weight"] = (width, size)
    return shapes


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    """Weights at a scale that keeps activations near one; the routing bias is float32 as in the released files."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = noise * 0.1
        elif "norm" in name and name.endswith(".weight"):
            tensors[name] = (1 + 0.1 * noise).to(dtype)
        elif len(shape) == 1:
            tensors[name] = (0.1 * noise).to(dtype)
        elif "pos_emb" in name or "embed_tokens" in name:
            tensors[name] = noise.to(dtype)
        else:
            tensors[name] = (noise / math.sqrt(math.prod(shape[1:]))).to(dtype)
    return tensors


K25_PROJECTOR = {"norm": "mm_projector.pre_norm", "in": "mm_projector.proj.0", "out": "mm_projector.proj.2"}
VL_PROJECTOR = {
    "norm": "multi_modal_projector.pre_norm",
    "in": "multi_modal_projector.linear_1",
    "out": "multi_modal_projector.linear_2",
}


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """int8 values of -8 to 7, (rows, columns), eight to an int32, the first in the lowest bits."""
    nibbles = (values.to(torch.int64) + 8).unflatten(1, (-1, 8))
    packed = sum(nibbles[..., place] << (4 * place) for place in range(8))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def quantise_experts(tensors: Tensors, group: int = 32) -> tuple[Tensors, Tensors]:
    """The routed experts as packed INT4, and the same weights as the loader must understand them."""
    packed, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".mlp.experts." not in name:
            continue
        del packed[name]
        grouped = weight.float().unflatten(1, (-1, group))
        scale = (grouped.abs().amax(2) / 7).to(torch.bfloat16)
        values = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
        packed[f"{name}_packed"] = pack_int4(values.flatten(1).to(torch.int8))
        packed[f"{name}_scale"] = scale
        packed[f"{name}_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
        plain[name] = (values * scale.float()[..., None]).flatten(1).to(weight.dtype)
    return packed, plain


# ---- files ----------------------------------------------------------------------------------------------------------


def write_json(file: Path, content: Any) -> None:
    """Write one JSON file."""
    file.write_text(json.dumps(content, indent=1) + "\n")


def write_weights(folder: Path, tensors: Tensors, shards: int = 2) -> None:
    """Write shards with six digits in their totals, and the index."""
    names = list(tensors)
    share = -(-len(names) // shards)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        held = {name: tensors[name] for name in names[number * share : (number + 1) * share]}
        save_file(held, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_k25(
    folder: Path,
    *,
    seed: int = 0,
    shards: int = 2,
    int4: bool = False,
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
    **text: Any,
) -> Tensors:
    """A K2.5 checkpoint.

    Args:
        folder: Where to; made if need be.
        seed: Of the weights.
        shards: Files of weights.
        int4: Pack the routed experts.
        dtype: Of the weights.
        generation: Content of ``generation_config.json``.
        **text: Changes to ``text_config``.

    Returns:
        The weights under official names, unpacked.
    """
    config = k25_config(**text)
    tensors = random_tensors(text_shapes(config["text_config"]) | vision_shapes(K25_PROJECTOR), seed, dtype)
    stored = tensors
    if int4:
        stored, tensors = quantise_experts(tensors)
    _write(folder, config, K25_PREPROCESSOR, stored, shards, generation, SPECIALS)
    return tensors


def write_vl(
    folder: Path,
    *,
    seed: int = 0,
    shards: int = 2,
    dtype: torch.dtype = torch.float32,
    generation: Mapping[str, Any] | None = None,
    **text: Any,
) -> Tensors:
    """A Kimi-VL checkpoint; arguments and result as for ``write_k25``."""
    config = vl_config(**text)
    tensors = random_tensors(text_shapes(config["text_config"]) | vision_shapes(VL_PROJECTOR), seed, dtype)
    _write(folder, config, VL_PREPROCESSOR, tensors, shards, generation, VL_SPECIALS)
    return tensors


def _write(
    folder: Path,
    config: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    tensors: Tensors,
    shards: int,
    generation: Mapping[str, Any] | None,
    specials: Mapping[int, str],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", preprocessor)
    write_json(folder / "generation_config.json", generation or {"eos_token_id": BASE + 1, "max_length": 1024})
    write_tokenizer(folder, specials)
    write_weights(folder, tensors, shards)
