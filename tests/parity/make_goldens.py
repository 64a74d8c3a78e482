"""Ask the oracles once and keep their answers: ``python -m tests.parity.make_goldens``.

Writes one small file per family: weights, pixels, and the features that family's independent implementation gives for
them in float32. ``test_goldens.py`` reads them back, so parity is checked where no oracle can be installed.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file

from moonvit.families import VisionConfig, config_dicts, family_config
from tests.parity import oracles
from tests.parity.cases import random_model

FOLDER = Path(__file__).parent / "goldens"
IMAGES = [(1, 4, 6), (1, 8, 8), (1, 12, 2), (1, 2, 2), (1, 6, 10)]
CLIPS = [(4, 4, 6), (2, 4, 4), (3, 2, 2)]
SMALL = {"num_layers": 2, "intermediate_size": 48, "text_hidden_size": 24, "pos_emb_height": 8, "pos_emb_width": 8}
CONFIGS = {
    "kimi-vl": family_config("kimi-vl", hidden_size=32, num_heads=2, **SMALL),
    "kimi-k2.5": family_config("kimi-k2.5", hidden_size=32, num_heads=2, **SMALL),
    "kimi-k3": family_config("kimi-k3", hidden_size=32, num_heads=3, qkv_size=48, norm_eps=2**-7, **SMALL),
}
ORACLES = {"kimi-vl": "kornia", "kimi-k2.5": "transformers", "kimi-k3": "mlx-vlm"}


def ask(
    config: VisionConfig, state: dict[str, torch.Tensor], patches: torch.Tensor, grids: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """Features of the family's oracle."""
    if config.family == "kimi-vl":
        return oracles.kornia_features(state, config, patches, grids)
    if config.family == "kimi-k3":
        return oracles.mlx_features(state, config, patches, grids)
    with TemporaryDirectory() as directory:
        oracles.write_k25_checkpoint(state, config, Path(directory))
        return oracles.transformers_features(oracles.load_transformers(Path(directory)), patches, grids)


def main() -> None:
    """Write all files."""
    FOLDER.mkdir(exist_ok=True)
    for seed, (family, config) in enumerate(CONFIGS.items()):
        # Weights are stored in half the bytes, and are exact in float32.
        small = {name: tensor.bfloat16() for name, tensor in random_model(config, seed=seed).state_dict().items()}
        state = {name: tensor.float() for name, tensor in small.items()}
        grids = IMAGES if family == "kimi-vl" else [*IMAGES, *CLIPS]
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (sum(t * h * w for t, h, w in grids), 588), generator=generator).byte()
        features = ask(config, state, (pixels.float() / 255 - 0.5) * 2, grids)
        tensors = {f"weights.{name}": tensor for name, tensor in small.items()}
        tensors |= {"pixels": pixels, "features": torch.cat(features).contiguous()}
        metadata = {
            "oracle": f"{ORACLES[family]} {version(ORACLES[family])}",
            "config": json.dumps(config_dicts(config)[0]),
            "grids": json.dumps(grids),
        }
        save_file(tensors, FOLDER / f"{family}.safetensors", metadata)


if __name__ == "__main__":
    main()
