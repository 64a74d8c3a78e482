"""Write a trained demo model as a checkpoint directory in the official K2.5 layout, or renamed in that of Kimi-VL.

python -m train.export --folder runs/demo --out src/moonvit/demo
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from train.config import STOP_IDS, demo_config
from train.model import DemoModel
from train.vocabulary import write

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""For engines that write prompts with Jinja: the prompts of ``moonvit.prompts.kimi_k25``."""
SHARD = "model-00001-of-000001.safetensors"
KIMI_VL_NAMES = {
    "mm_projector.pre_norm.": "multi_modal_projector.pre_norm.",
    "mm_projector.proj.0.": "multi_modal_projector.linear_1.",
    "mm_projector.proj.2.": "multi_modal_projector.linear_2.",
}


def load_state(folder: Path) -> dict[str, Tensor]:
    """Weights of a training run under their official names.

    Args:
        folder: Where ``state.pt`` lies.

    Returns:
        bfloat16 tensors; the routing bias stays float32.
    """
    saved = torch.load(folder / "state.pt", weights_only=True)
    tensors = {
        name: master.bfloat16().contiguous()
        for name, master in zip(saved["names"], saved["masters"], strict=True)
        if not name.startswith("head.")
    }
    buffers = [name for name, _ in DemoModel(demo_config()).named_buffers()]
    tensors |= dict(zip(buffers, (buffer.float() for buffer in saved["buffers"]), strict=True))
    return tensors


def preprocessor_config() -> dict[str, Any]:
    """The released picture settings of K2.5."""
    return {
        "media_proc_cfg": {
            "in_patch_limit": 16384,
            "patch_size": 14,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_kernel_size": 2,
            "fixed_output_tokens": None,
            "patch_limit_on_one_side": 512,
            "in_patch_limit_each_frame": 4096,
            "in_patch_limit_video": None,
            "sample_fps": 2.0,
            "max_num_frames_each_video": None,
            "temporal_merge_kernel_size": 4,
            "timestamp_mode": "hh:mm:ss.fff",
        }
    }


def kimi_vl_preprocessor_config() -> dict[str, Any]:
    """The released picture settings of Kimi-VL."""
    cfg = preprocessor_config()["media_proc_cfg"]
    shared = {key: cfg[key] for key in ("patch_size", "image_mean", "image_std")}
    return {**shared, "merge_kernel_size": [2, 2], "pad_input": True, "in_token_limit": 4096}


def kimi_vl(tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The same model under Kimi-VL's names.

    Args:
        tensors: Official K2.5 names.
        config: K2.5 ``config.json``.

    Returns:
        Tensors and ``config.json`` of the Kimi-VL schema.
    """
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((old for old in KIMI_VL_NAMES if name.startswith(old)), "")
        renamed[KIMI_VL_NAMES.get(prefix, prefix) + name[len(prefix) :]] = tensor
    plain = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    vision = {name: config["vision_config"][name] for name in plain}
    vision |= {"init_pos_emb_height": 64, "init_pos_emb_width": 64, "merge_kernel_size": [2, 2], "patch_size": 14}
    changed = {
        key: value for key, value in config.items() if key not in ("use_unified_vision_chunk", "video_placeholder")
    }
    changed |= {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl"}
    changed["vision_config"] = {"model_type": "moonvit", **vision}
    changed["text_config"] = {**config["text_config"], "model_type": "deepseek_v3"}
    return renamed, changed


def write_checkpoint(
    tensors: dict[str, Tensor], config: dict[str, Any], preprocessor: dict[str, Any], out: Path
) -> None:
    """Write one directory: weights, index, configurations, vocabulary, chat template.

    Args:
        tensors: Under official names.
        config: ``config.json``.
        preprocessor: ``preprocessor_config.json``.
        out: The directory.
    """
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / SHARD, metadata={"format": "pt"})
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), SHARD)}
    generation = {"eos_token_id": STOP_IDS, "pad_token_id": config["pad_token_id"], "do_sample": False}
    for name, content in (
        ("model.safetensors.index.json", index),
        ("config.json", config),
        ("preprocessor_config.json", preprocessor),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    begin = "<|media_start|>" if config["model_type"] == "kimi_vl" else "<|media_begin|>"
    write(out, begin)
    # In either schema the model reads the turns it was taught; Kimi-VL's own know no think block.
    (out / "chat_template.jinja").write_text(TEMPLATE.read_text().replace("<|media_begin|>", begin))


def main() -> None:
    """Read the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path("src/moonvit/demo"))
    parser.add_argument("--schema", choices=("kimi-k2.5", "kimi-vl"), default="kimi-k2.5")
    options = parser.parse_args()
    tensors, config, preprocessor = load_state(options.folder), demo_config(), preprocessor_config()
    if options.schema == "kimi-vl":
        tensors, config = kimi_vl(tensors, config)
        preprocessor = kimi_vl_preprocessor_config()
    write_checkpoint(tensors, config, preprocessor, options.out)
    print(f"{sum(t.numel() for t in tensors.values()):,} parameters in {options.out / SHARD}")


if __name__ == "__main__":
    main()
