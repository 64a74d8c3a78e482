"""Independent implementations, each run on our weights.

K2.5: the tower and projector of transformers. Kimi-VL: those of kornia. K3: those of mlx-vlm, on mlx's CPU build. Each
function takes weights under official names, normalised patches (L, 588) and grids, and returns one tensor per image.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moonvit.bench.rivals import load_transformers as load_transformers
from moonvit.bench.rivals import write_k25_checkpoint as write_k25_checkpoint
from moonvit.families import VisionConfig

Grids = Sequence[tuple[int, int, int]]


@torch.no_grad()
def transformers_features(model: Any, patches: torch.Tensor, grids: Grids) -> list[torch.Tensor]:
    """Features of transformers' tower and projector, one image per call; its own call for both takes no clips."""
    results, start = [], 0
    for t, h, w in grids:
        pixels = patches[start : start + t * h * w].view(-1, 3, 14, 14)
        start += t * h * w
        merged = model.model.vision_tower(pixels, grid_thw=torch.tensor([(t, h, w)])).pooler_output
        results.append(model.model.mm_projector(merged).flatten(0, 1))
    return results


@torch.no_grad()
def kornia_features(
    state: Mapping[str, torch.Tensor], config: VisionConfig, patches: torch.Tensor, grids: Grids
) -> list[torch.Tensor]:
    """Features of kornia's Kimi-VL vision model, which sees one picture at a time."""
    from kornia.models.kimi_vl import KimiVLConfig, KimiVLModel, KimiVLProjectorConfig, MoonViTConfig

    tower = MoonViTConfig(
        init_pos_emb_height=config.pos_emb_height,
        init_pos_emb_width=config.pos_emb_width,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
    )
    projector = KimiVLProjectorConfig(
        input_dim=config.hidden_size, hidden_dim=config.merged_size, output_dim=config.text_hidden_size
    )
    model = KimiVLModel(KimiVLConfig(vision_config=tower, projector_config=projector)).eval()
    names = {
        "encoder.blocks.": "encoder.layers.",
        ".norm1": ".norm2",
        ".norm0": ".norm1",
        ".fc1": ".fc2",
        ".fc0": ".fc1",
    }
    theirs: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        new = name.replace("vision_tower.", "vision_encoder.").replace("multi_modal_projector.", "projector.")
        new = new.replace("patch_embed.proj.", "patch_embed.").replace("encoder.final_layernorm", "norm")
        new = new.replace("linear_1", "mlp.0").replace("linear_2", "mlp.2").replace(".wo.", ".attn.out_proj.")
        for ours, other in names.items():
            new = new.replace(ours, other)
        if new.endswith("pos_emb.weight"):
            theirs["vision_encoder.pos_embed"] = tensor.flatten(0, 1)[None]
        elif ".wqkv." in new:
            for part, third in zip("qkv", tensor.chunk(3), strict=True):
                theirs[new.replace("wqkv", f"attn.{part}_proj")] = third
        else:
            theirs[new] = tensor
    model.load_state_dict(theirs, strict=True)

    results, start = [], 0
    for t, h, w in grids:
        assert t == 1
        pixels = patches[start : start + h * w].view(h, w, 3, 14, 14)
        start += h * w
        results.append(model(pixels.permute(2, 0, 3, 1, 4).reshape(1, 3, h * 14, w * 14))[0])
    return results


def mlx_vlm_is_installed() -> bool:
    """Whether its files are there; what it imports need not be."""
    return find_spec("mlx_vlm") is not None


def _import_k3() -> Any:
    """mlx-vlm's K3 modules without its package imports, which want much that a vision tower does not need."""
    spec = find_spec("mlx_vlm")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))

    @dataclass
    class BaseModelConfig:
        pass

    stubs: dict[str, dict[str, Any]] = {
        "mlx_vlm": {"__path__": [str(root)]},
        "mlx_vlm.models": {"__path__": [str(root / "models")]},
        "mlx_vlm.models.base": {
            "BaseModelConfig": BaseModelConfig,
            "InputEmbeddingsFeatures": object,
            "check_array_shape": lambda array: False,
        },
        "mlx_vlm.models.kimi_k3": {"__path__": [str(root / "models" / "kimi_k3")]},
        "mlx_vlm.models.kimi_k3.language": {"LanguageModel": object},
    }
    before = {name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"}
    assert not before, f"mlx_vlm was imported whole: {sorted(before)[:3]}"
    try:
        for name, attributes in stubs.items():
            module = types.ModuleType(name)
            module.__dict__.update(attributes)
            sys.modules[name] = module
        return importlib.import_module("mlx_vlm.models.kimi_k3.kimi_k3")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_vlm"]:
            del sys.modules[name]


def mlx_features(
    state: Mapping[str, torch.Tensor], config: VisionConfig, patches: torch.Tensor, grids: Grids
) -> list[torch.Tensor]:
    """Features of mlx-vlm's K3 tower and projector. Its norms have epsilon 2 ** -7, whatever the configuration says."""
    import mlx.core as mx
    import numpy as np

    assert config.norm_eps == 2**-7
    k3 = _import_k3()
    vision = k3.VisionModel.__init__.__globals__["VisionConfig"](
        init_pos_emb_height=config.pos_emb_height,
        init_pos_emb_width=config.pos_emb_width,
        vt_num_attention_heads=config.num_heads,
        vt_num_hidden_layers=config.num_layers,
        vt_hidden_size=config.hidden_size,
        vt_intermediate_size=config.intermediate_size,
        qkv_hidden_size=config.qkv_size,
        mm_hidden_size=config.hidden_size,
        text_hidden_size=config.text_hidden_size,
    )
    tower = k3.VisionModel(vision)
    text = types.SimpleNamespace(hidden_size=config.text_hidden_size)
    projector = k3.KimiK3MultiModalProjector(types.SimpleNamespace(vision_config=vision, text_config=text))

    def arrays(prefix: str) -> list[tuple[str, Any]]:
        pairs = []
        for name, tensor in state.items():
            if name.startswith(prefix):
                values = tensor.permute(0, 2, 3, 1) if name.endswith("patch_embed.proj.weight") else tensor
                pairs.append((name.removeprefix(prefix), mx.array(np.ascontiguousarray(values.numpy()))))
        return pairs

    tower.load_weights(arrays("vision_tower."), strict=True)
    projector.load_weights(arrays("mm_projector."), strict=True)
    results, start = [], 0
    for t, h, w in grids:
        pixels = patches[start : start + t * h * w].view(-1, 3, 14, 14).permute(0, 2, 3, 1)
        start += t * h * w
        merged = tower(mx.array(np.ascontiguousarray(pixels.numpy())), [[t, h, w]])
        results.append(torch.from_numpy(np.array(projector(merged))))
    return results
