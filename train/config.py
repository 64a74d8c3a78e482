"""The demo model's ``config.json``: the K2.5 schema at a few million parameters."""

from __future__ import annotations

from typing import Any

from train.vocabulary import BASE, EOS, IM_END, MEDIA_PAD, PAD, VOCAB

GLYPHS = 37
"""Classes of the dense glyph label: none, 26 letters, 10 digits."""


def demo_config() -> dict[str, Any]:
    """The configuration of the demo model.

    Returns:
        ``config.json`` as a dictionary; ``vt_*`` and plain names stand side by side and agree.
    """
    tower = {"hidden_size": 192, "intermediate_size": 768, "num_attention_heads": 3, "num_hidden_layers": 6}
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": BASE,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": MEDIA_PAD,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {
            "init_pos_emb_height": 64,
            "init_pos_emb_time": 4,
            "init_pos_emb_width": 64,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_hidden_size": 192,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "pos_emb_type": "divided_fixed",
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-05,
            "text_hidden_size": 192,
            "video_attn_type": "spatial_temporal",
            **{f"vt_{name}": value for name, value in tower.items()},
            **tower,
        },
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "hidden_size": 192,
            "intermediate_size": 512,
            "moe_intermediate_size": 96,
            "num_hidden_layers": 6,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
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
            "routed_scaling_factor": 1.0,
            "q_lora_rank": 96,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
            "rms_norm_eps": 1e-05,
            "rope_theta": 50000.0,
            "rope_scaling": None,
            "max_position_embeddings": 32768,
            "vocab_size": VOCAB,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "attention_bias": False,
            "bos_token_id": BASE,
            "eos_token_id": IM_END,
            "pad_token_id": PAD,
        },
    }


STOP_IDS = [IM_END, EOS]
