"""What the oracles answered when ``make_goldens.py`` asked them, against our features today."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from moonvit.checkpoint import load_tensors
from moonvit.families import FAMILIES, config_from_dict
from moonvit.model import VisionModel
from moonvit.reference import max_relative_error
from tests.parity.cases import GATE
from tests.parity.make_goldens import CONFIGS, FOLDER, ORACLES


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_those_the_oracle_gave(family: str) -> None:
    with safe_open(FOLDER / f"{family}.safetensors", "pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    config, grids = config_from_dict(json.loads(facts["config"])), json.loads(facts["grids"])
    assert config == CONFIGS[family]
    assert facts["oracle"].startswith(ORACLES[family])
    model = VisionModel.empty(config)
    load_tensors(model, ((name.removeprefix("weights."), t) for name, t in tensors.items() if name[:8] == "weights."))
    features = torch.cat(model(tensors["pixels"], model.prepare(grids, rows=48)))
    assert max_relative_error([features], [tensors["features"]]) <= GATE
