"""Names, shards and strictness of vision checkpoints."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moonvit import checkpoint
from moonvit.checkpoint import (
    check_vision,
    expected_shapes,
    known_names,
    load_tensors,
    load_vision,
    read_config,
    resolve,
    save_tensors,
    save_vision,
    vision_shards,
)
from moonvit.errors import CheckpointError, ConfigError, MissingDependencyError
from moonvit.families import FAMILIES, VisionConfig, config_dicts, config_from_dict, family_config
from moonvit.model import VisionModel
from tests.parity.cases import random_model, tiny
from tests.parity.oracles import load_transformers, write_k25_checkpoint

Tensors = dict[str, torch.Tensor]
FAMILY_NAMES = list(FAMILIES)


@pytest.fixture(params=FAMILY_NAMES)
def model(request: pytest.FixtureRequest) -> VisionModel:
    return random_model(tiny(request.param, num_layers=12))  # two-digit block numbers


@pytest.fixture
def k25() -> VisionModel:
    return random_model(tiny("kimi-k2.5"))


def state_of(model: VisionModel) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: VisionModel, state: Tensors) -> bool:
    return model.state_dict().keys() == state.keys() and all(
        torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()
    )


def write(tensors: Tensors, path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def shard(tensors: Tensors, directory: Path, total: str = "000064") -> dict[str, Path]:
    """Split into the projector's shard, the tower's, and a text shard, with an index, as K2.5 is released."""
    files = {
        "text": directory / f"model-00062-of-{total}.safetensors",
        "projector": directory / f"model-00063-of-{total}.safetensors",
        "tower": directory / f"model-00064-of-{total}.safetensors",
    }
    text = {"language_model.model.norm.weight": torch.ones(4), "language_model.lm_head.weight": torch.ones(4, 4)}
    parts = {
        "text": text,
        "projector": {name: tensor for name, tensor in tensors.items() if "projector" in name},
        "tower": {name: tensor for name, tensor in tensors.items() if "projector" not in name},
    }
    weight_map = {name: files[part].name for part, held in parts.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for part, held in parts.items():
        write(held, files[part])
    return files


# ---- sources --------------------------------------------------------------------------------------------------------


def test_a_single_file_and_a_directory_with_one(model: VisionModel, tmp_path: Path) -> None:
    state = state_of(model)
    file = write(state | {"language_model.lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert same(load_vision(model.config, file), state)
    assert same(load_vision(model.config, tmp_path), state)
    assert same(load_vision(model.config, str(tmp_path)), state)


@pytest.mark.parametrize("total", ["000064", "00064"])
def test_only_the_shards_with_vision_are_opened(model: VisionModel, tmp_path: Path, total: str) -> None:
    state = state_of(model)
    files = shard(state, tmp_path, total)
    files["text"].write_bytes(b"not safetensors")
    assert same(load_vision(model.config, tmp_path), state)
    files["text"].unlink()
    assert same(load_vision(model.config, tmp_path), state)
    assert set(vision_shards(tmp_path)) == {files["projector"], files["tower"]}


def test_a_missing_or_broken_vision_shard_is_named(k25: VisionModel, tmp_path: Path) -> None:
    files = shard(state_of(k25), tmp_path)
    content = files["tower"].read_bytes()
    files["tower"].write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model-00064-of-000064\.safetensors cannot be read as safetensors"):
        load_vision(k25.config, tmp_path)
    files["tower"].unlink()
    with pytest.raises(CheckpointError, match=r"names model-00064-of-000064\.safetensors, which is not there"):
        load_vision(k25.config, tmp_path)


def test_an_index_that_promises_more_than_its_shard_holds(k25: VisionModel, tmp_path: Path) -> None:
    state = state_of(k25)
    files = shard(state, tmp_path)
    gone = "vision_tower.encoder.blocks.1.wo.weight"
    write({name: t for name, t in state.items() if "projector" not in name and name != gone}, files["tower"])
    with pytest.raises(CheckpointError, match=f"1 missing: {gone}$"):
        load_vision(k25.config, tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "expected an object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"vision_tower.x": "../x.safetensors"}}', r"'\.\./x\.safetensors', which is not a file name"),
        ('{"weight_map": {"vision_tower.x": 7}}', "in 7, which is not a file name"),
        ('{"weight_map": {"vision_tower.x": "%s"}}' % ("n" * 300), "nnn.*, which is not a file name"),
    ],
)
def test_a_broken_index(k25: VisionModel, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_vision(k25.config, tmp_path)


def test_a_directory_without_weights(k25: VisionModel, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        load_vision(k25.config, tmp_path)


def test_weights_come_in_the_dtype_asked_for(model: VisionModel, tmp_path: Path) -> None:
    state = state_of(model)
    file = write({name: tensor.bfloat16() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        loaded = load_vision(model.config, file, dtype)
        assert loaded.dtype == dtype and not loaded.training
        assert same(loaded, {name: tensor.bfloat16().to(dtype) for name, tensor in state.items()})


def test_a_given_model_is_filled_and_keeps_its_dtype(model: VisionModel, tmp_path: Path) -> None:
    state = state_of(model)
    file = write(state, tmp_path / "x.safetensors")
    target = random_model(model.config, torch.bfloat16, seed=9)
    assert load_vision(target, file) is target
    assert same(target, {name: tensor.bfloat16() for name, tensor in state.items()})


# ---- spellings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["official", "transformers", "runtime"])
def test_every_spelling_comes_back(model: VisionModel, tmp_path: Path, spelling: Any) -> None:
    file = tmp_path / "x.safetensors"
    save_vision(model, file, spelling)
    names = set(load_file(file))
    assert (names == set(model.state_dict())) == (spelling == "official")
    assert same(load_vision(model.config, file), state_of(model))


def test_transformers_spelling_by_hand(tmp_path: Path) -> None:
    model = random_model(tiny("kimi-k2.5", num_layers=1))
    save_vision(model, tmp_path / "x.safetensors", "transformers")
    saved, official = load_file(tmp_path / "x.safetensors"), model.state_dict()
    block, layer = "vision_tower.encoder.blocks.0", "model.vision_tower.layers.0"
    renamed = {
        f"{layer}.norm1.weight": f"{block}.norm0.weight",
        f"{layer}.norm2.bias": f"{block}.norm1.bias",
        f"{layer}.mlp.fc1.weight": f"{block}.mlp.fc0.weight",
        f"{layer}.mlp.fc2.bias": f"{block}.mlp.fc1.bias",
        f"{layer}.attn.proj.weight": f"{block}.wo.weight",
        "model.vision_tower.final_layernorm.weight": "vision_tower.encoder.final_layernorm.weight",
        "model.vision_tower.patch_embed.pos_emb.position_embeddings": "vision_tower.patch_embed.pos_emb.weight",
        "model.vision_tower.patch_embed.proj.bias": "vision_tower.patch_embed.proj.bias",
        "model.mm_projector.in_proj.weight": "mm_projector.proj.0.weight",
        "model.mm_projector.out_proj.bias": "mm_projector.proj.2.bias",
        "model.mm_projector.pre_norm.weight": "mm_projector.pre_norm.weight",
    }
    for name, source in renamed.items():
        assert torch.equal(saved[name], official[source]), name
    heads, head_dim, size = 2, 36, 72
    for kind in ("weight", "bias"):
        fused = official[f"{block}.wqkv.{kind}"]
        assert torch.equal(saved[f"{layer}.attn.v_proj.{kind}"], fused[2 * size :])
        for part, name in enumerate("qk"):
            turned = saved[f"{layer}.attn.{name}_proj.{kind}"]
            for head in range(heads):
                for half in range(2):
                    for pair in range(head_dim // 2):
                        ours = part * size + head * head_dim + 2 * pair + half
                        assert torch.equal(turned[head * head_dim + half * head_dim // 2 + pair], fused[ours])


@pytest.mark.parametrize("restored", [False, True], ids=["its own names", "names it restored"])
def test_a_checkpoint_that_transformers_saved(tmp_path: Path, k25: VisionModel, restored: bool) -> None:
    write_k25_checkpoint(k25.state_dict(), k25.config, tmp_path / "official")
    theirs = load_transformers(tmp_path / "official")
    theirs.save_pretrained(tmp_path / "saved", save_original_format=restored)
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        assert set(file.keys()) != set(load_file(tmp_path / "official" / "model.safetensors"))
    config, raw = read_config(tmp_path / "saved")
    assert config == k25.config and raw["model_type"] == "kimi_k25"
    assert same(load_vision(config, tmp_path / "saved"), state_of(k25))


def test_nemo_prefix_and_mixed_spellings(model: VisionModel, tmp_path: Path) -> None:
    state = state_of(model)
    mixed = {(f"model.{name}" if index % 2 else name): tensor for index, (name, tensor) in enumerate(state.items())}
    assert same(load_vision(model.config, write(mixed, tmp_path / "x.safetensors")), state)


def test_names_are_unambiguous_and_complete(model: VisionModel) -> None:
    names, shapes = known_names(model.config), expected_shapes(model.config)
    assert {piece.name for piece in names.values()} == set(shapes)
    assert all(names[name] == (name, None) for name in shapes)


# ---- strictness -----------------------------------------------------------------------------------------------------


def test_all_differences_are_listed_together(k25: VisionModel, tmp_path: Path) -> None:
    state = state_of(k25)
    del state["vision_tower.encoder.blocks.0.wo.bias"]
    del state["mm_projector.proj.2.weight"]
    state["vision_tower.encoder.blocks.3.wo.bias"] = torch.ones(72)
    state["mm_projector.rot_proj.weight"] = torch.ones(2, 2)
    state["vision_tower.encoder.blocks.1.mlp.fc0.weight"] = torch.ones(72, 100)
    state["model.mm_projector.linear_1.bias"] = state["mm_projector.proj.0.bias"].clone()
    with pytest.raises(CheckpointError) as caught:
        load_vision(k25.config, write(state, tmp_path / "x.safetensors"))
    message = str(caught.value)
    for part in (
        "2 missing: vision_tower.encoder.blocks.0.wo.bias, mm_projector.proj.2.weight",
        "2 unexpected: mm_projector.rot_proj.weight, vision_tower.encoder.blocks.3.wo.bias",
        "1 of a wrong shape: vision_tower.encoder.blocks.1.mlp.fc0.weight is [72, 100], expected [100, 72]",
        "1 given twice: mm_projector.proj.0.bias and model.mm_projector.linear_1.bias",
    ):
        assert part in message
    assert "x.safetensors" in message


def test_a_fused_weight_beside_its_thirds(k25: VisionModel, tmp_path: Path) -> None:
    state = state_of(k25)
    state["vision_tower.layers.0.attn.k_proj.weight"] = torch.ones(72, 72)
    with pytest.raises(CheckpointError, match=r"given twice: .*blocks\.0\.wqkv\.weight.*k_proj"):
        load_vision(k25.config, write(state, tmp_path / "x.safetensors"))
    del state["vision_tower.encoder.blocks.0.wqkv.weight"]
    with pytest.raises(CheckpointError, match=r"2 missing: .*wqkv\.weight \(q third\), .*wqkv\.weight \(v third\)"):
        load_vision(k25.config, write(state, tmp_path / "x.safetensors"))


def test_a_long_list_is_cut_and_counted(k25: VisionModel, tmp_path: Path) -> None:
    file = write({"language_model.lm_head.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=rf"{len(k25.state_dict())} missing: .* \.\.\.$"):
        load_vision(k25.config, file)


def test_another_family_is_not_loaded_by_chance(tmp_path: Path) -> None:
    vl = random_model(tiny("kimi-vl"))
    with pytest.raises(CheckpointError, match=r"missing.*mm_projector.*unexpected.*multi_modal_projector"):
        load_vision(tiny("kimi-k2.5"), write(state_of(vl), tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("vision_tower.encoder.blocks.0.wqkv.weight_packed", torch.ones(216, 9, dtype=torch.int32)),
        ("vision_tower.encoder.blocks.0.wqkv.weight", torch.ones(216, 72, dtype=torch.uint8)),
        ("vision_tower.encoder.blocks.0.wqkv.weight", torch.ones(216, 72).to(torch.float8_e5m2)),
    ],
)
def test_other_ways_of_quantising_are_refused_by_name(
    k25: VisionModel, tmp_path: Path, name: str, tensor: torch.Tensor
) -> None:
    state = state_of(k25)
    del state["vision_tower.encoder.blocks.0.wqkv.weight"]
    scale = "vision_tower.encoder.blocks.0.wqkv.weight_scale"
    file = write(state | {name: tensor, scale: torch.ones(216)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_vision(k25.config, file)
    message = str(caught.value)
    assert "2 quantised in a way that is not supported" in message
    assert name in message and scale in message
    assert "missing" not in message and "unexpected" not in message


def test_nothing_is_read_before_the_headers_fit(k25: VisionModel, tmp_path: Path) -> None:
    state = state_of(k25)
    del state["mm_projector.pre_norm.bias"]
    target = random_model(k25.config, seed=5)
    before = state_of(target)
    with pytest.raises(CheckpointError):
        load_vision(target, write(state, tmp_path / "x.safetensors"))
    assert same(target, before)


def test_tensors_may_come_as_they_are(model: VisionModel) -> None:
    state = state_of(model)
    strided = {name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in state.items()}
    assert any(not tensor.is_contiguous() for tensor in strided.values())
    target = random_model(model.config, seed=5)
    filled = load_tensors(target, [("language_model.lm_head.weight", torch.ones(2)), *strided.items()])
    assert filled == set(state)
    assert same(target, state)
    strided.popitem()
    with pytest.raises(CheckpointError, match="1 missing"):
        load_tensors(target, strided.items())


# ---- configuration and writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        *FAMILIES.values(),
        family_config("kimi-vl-2506"),
        *(tiny(name) for name in FAMILY_NAMES),
        tiny("kimi-k3", norm_eps=2**-7),
    ],
    ids=lambda config: f"{config.family}-{config.hidden_size}-{config.norm_eps}",
)
def test_configurations_come_back(config: VisionConfig, tmp_path: Path) -> None:
    raw, preprocessor = config_dicts(config)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    assert read_config(tmp_path) == (config, raw)


def test_settings_that_transformers_keeps_elsewhere(k25: VisionModel, tmp_path: Path) -> None:
    write_k25_checkpoint(k25.state_dict(), k25.config, tmp_path / "official")
    load_transformers(tmp_path / "official").save_pretrained(tmp_path / "saved", save_original_format=False)
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert raw["projection_layer_norm_eps"] == 1e-5
    assert raw["vision_config"]["rope_parameters"]["rope_theta"] == 10000.0
    raw["projection_layer_norm_eps"] = 1e-6
    with pytest.raises(ConfigError, match=r"projector_ln_eps = 1e-05, projection_layer_norm_eps = 1e-06"):
        config_from_dict(raw)
    del raw["vision_config"]["projector_ln_eps"]
    raw["vision_config"]["rope_parameters"]["rope_theta"] = 5000.0
    config = config_from_dict(raw)
    assert (config.projector_norm_eps, config.rope_theta) == (1e-6, 5000.0)


def test_what_the_files_cannot_say_is_not_written(tmp_path: Path) -> None:
    model = random_model(tiny("kimi-k2.5", rope_theta=5000.0))
    with pytest.raises(ConfigError, match=r"rope_theta=5000\.0"):
        save_vision(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_saved_directory_is_a_checkpoint(model: VisionModel, tmp_path: Path) -> None:
    half = model.to(torch.bfloat16)
    save_vision(half, tmp_path / "out")
    config, _ = read_config(tmp_path / "out")
    assert config == half.config
    assert same(load_vision(config, tmp_path / "out", torch.bfloat16), state_of(half))
    assert read_config(tmp_path / "out" / "model.safetensors")[0] == config


def test_read_config_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="llama"):
        read_config(tmp_path)


# ---- the hub --------------------------------------------------------------------------------------------------------


def _fake_hub(monkeypatch: pytest.MonkeyPatch, remote: Path, local: Path) -> list[list[str]]:
    """A huggingface_hub whose one repository is a directory; files that were not asked for do not come."""
    asked: list[list[str]] = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        if repo_id != "moonshotai/Tiny":
            raise OSError(f"404: {repo_id}")
        asked.append(allow_patterns)
        local.mkdir(exist_ok=True)
        for name in allow_patterns:
            if (remote / name).is_file():
                (local / name).write_bytes((remote / name).read_bytes())
        return str(local)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


@pytest.mark.parametrize("sharded", [True, False])
def test_only_vision_files_come_from_the_hub(
    k25: VisionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    remote, local = tmp_path / "remote", tmp_path / "local"
    save_vision(k25, remote)
    if sharded:
        (remote / "model.safetensors").unlink()
        shard(state_of(k25), remote)
    (remote / "tokenizer.json").write_text("{}")
    asked = _fake_hub(monkeypatch, remote, local)
    config, _ = read_config("moonshotai/Tiny")
    assert same(load_vision(config, "moonshotai/Tiny"), state_of(k25))
    came = {file.name for file in local.iterdir()}
    assert "config.json" in came and "tokenizer.json" not in came
    assert not any("00062" in name for name in came)
    assert len([name for name in came if name.endswith(".safetensors")]) == (2 if sharded else 1)
    assert not any("*" in pattern for patterns in asked for pattern in patterns)


def test_hub_failures_are_checkpoint_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_hub(monkeypatch, tmp_path, tmp_path / "local")
    with pytest.raises(CheckpointError, match=r"someone/else is not here, and the hub did not give it: 404"):
        resolve("someone/else")
    with pytest.raises(CheckpointError, match="not a directory or file here, nor an owner/name"):
        resolve("/nowhere/at/all")


def test_without_the_hub_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match="pip install huggingface_hub"):
        resolve("moonshotai/Kimi-K2.5")
    assert "huggingface_hub" not in vars(checkpoint)


# ---- looking without loading ----------------------------------------------------------------------------------------


def test_check_vision_describes_a_checkpoint(k25: VisionModel, tmp_path: Path) -> None:
    save_vision(k25.to(torch.bfloat16), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    shard(state_of(k25), tmp_path)["text"].unlink()
    report = check_vision(tmp_path)
    parameters = sum(parameter.numel() for parameter in k25.parameters())
    assert report == {
        "path": str(tmp_path),
        "family": "kimi-k2.5",
        "layers": 3,
        "width": 72,
        "language_width": 48,
        "shards": 2,
        "tensors": len(k25.state_dict()),
        "parameters": parameters,
        "bytes": 2 * parameters,
        "dtypes": "BF16",
        "packed": "nothing",
    }


def test_check_vision_names_tensors_that_are_not_finite(k25: VisionModel, tmp_path: Path) -> None:
    with torch.no_grad():
        k25.vision_tower.encoder.blocks[2].wo.bias[5] = torch.inf
    save_vision(k25, tmp_path)
    with pytest.raises(CheckpointError, match=r"1 tensor\(s\) hold NaN or infinity: .*blocks\.2\.wo\.bias$"):
        check_vision(tmp_path)
    state = state_of(k25)
    del state["mm_projector.pre_norm.bias"]
    write(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: mm_projector\.pre_norm\.bias"):
        check_vision(tmp_path)


def test_save_tensors_follows_links_and_leaves_a_file_others_may_read(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    before = os.umask(0o027)
    try:
        save_tensors({"a": torch.zeros(1)}, tmp_path / "link", {})
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o640


def test_save_tensors_takes_them_as_they_are(tmp_path: Path) -> None:
    features = torch.arange(12.0).view(3, 4)
    save_tensors({"a": features.T, "b": features[:, 1]}, tmp_path / "f.safetensors", {"model": "x"})
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert file.metadata() == {"model": "x"}
        assert torch.equal(file.get_tensor("a"), features.T) and torch.equal(file.get_tensor("b"), features[:, 1])
