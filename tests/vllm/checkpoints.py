"""Checkpoints that the engine serves."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from moonvit.engines import default_model
from tests import tiny
from train.export import SHARD, TEMPLATE, kimi_vl, kimi_vl_preprocessor_config, write_checkpoint


def renamed_demo(folder: Path) -> Path:
    """The demo model in the schema of Kimi-VL."""
    demo = default_model()
    tensors, config = kimi_vl(load_file(demo / SHARD), json.loads((demo / "config.json").read_text()))
    write_checkpoint(tensors, config, kimi_vl_preprocessor_config(), folder)
    return folder


def random_k25(folder: Path) -> Path:
    """Random weights whose heads two ranks can share, with the latent widths that the engine's CPU kernels know."""
    tiny.write_k25(folder, kv_lora_rank=512, qk_rope_head_dim=64, rope_scaling=None, max_position_embeddings=4096)
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    preprocessor["media_proc_cfg"]["in_patch_limit"] = 1024
    tiny.write_json(folder / "preprocessor_config.json", preprocessor)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return folder
