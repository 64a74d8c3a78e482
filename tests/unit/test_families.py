"""Families as rows, read from every config dialect; what contradicts itself, or changes the arithmetic, is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonvit.engines import default_model
from moonvit.errors import ConfigError
from moonvit.families import (
    ALIASES,
    FAMILIES,
    PREFIXES,
    ImageRule,
    VisionConfig,
    config_dicts,
    config_from_dict,
    family_config,
    rule_from_dict,
)

DATA = Path(__file__).parent / "data"
CONFIGS: dict[str, dict[str, Any]] = json.loads((DATA / "configs.json").read_text())
PREPROCESSORS: dict[str, dict[str, Any]] = json.loads((DATA / "preprocessors.json").read_text())
NAMES = list(FAMILIES)


def raw(name: str, **vision: Any) -> dict[str, Any]:
    """A released config.json with fields of vision_config changed; None takes one out."""
    config = copy.deepcopy(CONFIGS[name])
    for key, value in vision.items():
        if value is None:
            config["vision_config"].pop(key, None)
        else:
            config["vision_config"][key] = value
    return config


# ---- the rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_released_files_give_the_row(name: str) -> None:
    assert config_from_dict(CONFIGS[name]) == FAMILIES[name]  # type: ignore[index]
    assert config_from_dict(CONFIGS[name], PREPROCESSORS[name]) == FAMILIES[name]  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [("kimi-vl", 447_545_840, 335), ("kimi-k2.5", 471_143_920, 335), ("kimi-k3", 447_358_976, 168)],
)
def test_rows_have_the_released_numbers_of_parameters(name: str, parameters: int, tensors: int) -> None:
    c = family_config(name)
    norm = 2 * c.hidden_size if c.norm == "layernorm" else c.hidden_size
    d, q, i, k, e = c.hidden_size, c.qkv_size, c.intermediate_size, c.merged_size, c.text_hidden_size
    attn, linear, patch = int(c.attn_bias), int(c.linear_bias), int(c.patch_bias)
    block = 2 * norm + (3 * q * d + attn * 3 * q) + (d * q + attn * d) + (i * d + linear * i) + (d * i + linear * d)
    last = 2 * d if c.projector == "pre_norm" else e
    projector = last + k * k + linear * k + e * k + linear * e
    total = d * 588 + patch * d + c.pos_emb_height * c.pos_emb_width * d + c.num_layers * block + norm + projector
    assert total == parameters
    norms = 2 if c.norm == "layernorm" else 1
    in_block = 2 * norms + 2 * (1 + attn) + 2 * (1 + linear)
    count = 1 + patch + 1 + c.num_layers * in_block + norms + 2 * (1 + linear)
    count += 2 if c.projector == "pre_norm" else 1
    assert count == tensors


def test_numbers_that_the_files_leave_to_the_code() -> None:
    vl, k25, k3 = (family_config(name) for name in NAMES)
    assert (vl.norm_eps, k25.norm_eps, k3.norm_eps) == (1e-5, 1e-5, 2.0**-23)
    assert {c.projector_norm_eps for c in (vl, k25, k3)} == {1e-5}
    assert {c.rope_theta for c in (vl, k25, k3)} == {10000.0}
    assert [c.head_dim for c in (vl, k25, k3)] == [72, 72, 128]
    assert [c.pos_emb_mode for c in (vl, k25, k3)] == ["bicubic", "bicubic", "bilinear"]
    assert [c.pos_emb_time for c in (vl, k25, k3)] == [1, 4, 4]
    assert [c.rule.patch_limit for c in (vl, k25, k3)] == [4096, 16384, 65536]
    assert [c.rule.alpha for c in (vl, k25, k3)] == ["white", "white", "chessboard"]
    assert [c.rule.rgb_first for c in (vl, k25, k3)] == [False, True, False]
    assert family_config("kimi-vl-2506") == replace(vl, rule=replace(vl.rule, patch_limit=16384))
    assert PREFIXES["kimi-vl"][1] != PREFIXES["kimi-k2.5"][1] == PREFIXES["kimi-k3"][1]


@pytest.mark.parametrize("spelling", [*ALIASES, "KIMI-K3", "Kimi-VL"])
def test_other_spellings(spelling: str) -> None:
    assert family_config(spelling) == FAMILIES[ALIASES.get(spelling.lower(), spelling.lower())]  # type: ignore[index,arg-type]


def test_overrides() -> None:
    c = family_config("kimi-k2.5", hidden_size=64, num_heads=2, num_layers=0)
    assert (c.hidden_size, c.qkv_size, c.head_dim, c.num_layers) == (64, 64, 32, 0)
    k3 = family_config("kimi-k3", hidden_size=64)
    assert k3.qkv_size == 1536  # in K3 the two are apart
    assert family_config("kimi-k2.5", hidden_size=64, qkv_size=128, num_heads=2).head_dim == 64


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("kimi-k9", {}, "unknown model family 'kimi-k9'"),
        ("kimi-k3", {"layers": 2, "colour": 1}, "unknown configuration field(s): colour, layers"),
        ("kimi-k3", {"num_heads": 7}, "qkv_size = 1536 over 7 heads"),
        ("kimi-k3", {"num_heads": 768}, "qkv_size = 1536 over 768 heads"),
        ("kimi-k3", {"num_heads": 0}, "num_heads = 0, must be a whole number of 1 to 2147483647"),
        ("kimi-k3", {"hidden_size": -4}, "hidden_size = -4, must be a whole number of 1 to 2147483647"),
        ("kimi-k3", {"num_layers": 10**6}, "num_layers = 1000000, must be a whole number of 0 to 1000"),
        ("kimi-k3", {"num_layers": -1}, "num_layers = -1, must be a whole number of 0 to 1000"),
        ("kimi-k3", {"hidden_size": "1024"}, "hidden_size = '1024', must be a whole number"),
        ("kimi-k3", {"pos_emb_height": 0}, "pos_emb_height = 0, must be a whole number of 1 to 2147483647"),
        ("kimi-k3", {"norm_eps": "x"}, "norm_eps = 'x', must be a number above 0"),
        ("kimi-k3", {"rope_theta": 0.0}, "rope_theta = 0.0, must be a number above 0"),
        ("kimi-k3", {"attn_bias": "false"}, "attn_bias = 'false', must be true or false"),
        ("kimi-k3", {"norm": "batchnorm"}, "norm = 'batchnorm', must be one of layernorm, rmsnorm"),
        ("kimi-k3", {"projector": "linear"}, "projector = 'linear', must be one of pre_norm, post_norm"),
        ("kimi-k3", {"rule": {}}, "rule = {}, must be an ImageRule"),
    ],
)
def test_rows_that_cannot_be(name: str, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        family_config(name, **overrides)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("fields_", "said"),
    [
        ({"patch_limit": 0}, "patch_limit = 0, allowed are whole numbers of at least 1"),
        ({"patch_limit": 4096.0}, "patch_limit = 4096.0"),
        ({"side_limit": 513}, "side_limit = 513, allowed are whole numbers of 2 to 512"),
        ({"side_limit": True}, "side_limit = True"),
        ({"token_limit": 0}, "token_limit = 0"),
        ({"token_limit": 9, "pad": False, "kind": "kimi-vl"}, "token_limit = 9 needs a rule that pads"),
        ({"pad": "false"}, "pad = 'false', must be true or false"),
        ({"frame_patch_limit": "x"}, "frame_patch_limit = 'x', allowed are whole numbers of at least 0"),
        ({"kind": "square"}, "kind = 'square', must be one of navit, kimi-vl"),
        ({"alpha": "black"}, "alpha = 'black', must be one of white, chessboard, drop"),
        ({"pad": False}, "pad is false, but only Kimi-VL has a rule that crops"),
    ],
)
def test_rules_that_cannot_be(fields_: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ImageRule(**fields_)
    assert said in caught.value.message


# ---- dialects -------------------------------------------------------------------------------------------------------

PLAIN = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
}


def renamed(name: str, *, keep: bool) -> dict[str, Any]:
    config = raw(name)
    vision = config["vision_config"]
    for prefixed, plain in PLAIN.items():
        vision[plain] = vision[prefixed] if keep else vision.pop(prefixed)
    return config


def as_objects(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return SimpleNamespace(**{key: as_objects(item) for key, item in value.items()})


@pytest.mark.parametrize("name", ["kimi-k2.5", "kimi-k3"])
@pytest.mark.parametrize("form", [dict, as_objects])
def test_prefixed_plain_and_both(name: str, form: Any) -> None:
    for config in (raw(name), renamed(name, keep=False), renamed(name, keep=True)):
        assert config_from_dict(form(config)) == FAMILIES[name]  # type: ignore[index]


@pytest.mark.parametrize("plain", PLAIN.values())
def test_spellings_that_disagree(plain: str) -> None:
    config = renamed("kimi-k2.5", keep=True)
    config["vision_config"][plain] += 1
    with pytest.raises(ConfigError, match=rf"contradicts itself: vision_config\.vt_{plain} = \d+, .*{plain} = \d+"):
        config_from_dict(config)


def test_widths_of_the_language_model_that_disagree() -> None:
    config = raw("kimi-k2.5", text_hidden_size=4096)
    with pytest.raises(ConfigError, match=r"text_hidden_size = 4096, text_config\.hidden_size = 7168"):
        config_from_dict(config)
    config = raw("kimi-vl")
    config["text_config"]["hidden_size"] = 512
    assert config_from_dict(config).text_hidden_size == 512


def test_resaved_by_transformers() -> None:
    config = {
        "model_type": "kimi_k25",
        "projection_hidden_size": 1152,
        "projection_hidden_act": "gelu",
        "projection_layer_norm_eps": 1e-5,
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "pos_emb_height": 64,
            "pos_emb_width": 64,
            "pos_emb_time": 4,
            "merge_kernel_size": (2, 2),
            "hidden_act": "gelu_pytorch_tanh",
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "text_config": {"model_type": "deepseek_v3", "hidden_size": 7168},
    }
    assert config_from_dict(config) == FAMILIES["kimi-k2.5"]
    for key, value, said in (
        ("projection_hidden_act", "gelu_pytorch_tanh", "projection_hidden_act = 'gelu_pytorch_tanh' is not supported"),
        ("projection_hidden_size", 1024, "projection_hidden_size = 1024 but the tower width is 1152"),
    ):
        with pytest.raises(ConfigError) as caught:
            config_from_dict({**config, key: value})
        assert said in caught.value.message
    assert config_from_dict({**config, "projection_layer_norm_eps": 1e-6}).projector_norm_eps == 1e-6


def test_fields_that_say_nothing_about_the_tower_do_no_harm() -> None:
    config = raw("kimi-k2.5", model_type="", some_new_field=3, _attn_implementation="eager")
    config["text_config"]["model_type"] = "deepseek_v3"
    config["quantization_config"] = {"quant_method": "fp8"}
    assert config_from_dict(config) == FAMILIES["kimi-k2.5"]


def test_the_epsilon_of_k3_can_be_set() -> None:
    assert config_from_dict(raw("kimi-k3", vision_norm_eps=2**-7)).norm_eps == 2**-7


@pytest.mark.parametrize(
    ("name", "vision", "said"),
    [
        ("kimi-k2.5", {"patch_size": 16}, "vision_config.patch_size = 16 is not supported; supported: 14"),
        ("kimi-k2.5", {"merge_kernel_size": [2, 4]}, "vision_config.merge_kernel_size = [2, 4] is not supported"),
        ("kimi-k2.5", {"merge_type": "mean"}, "vision_config.merge_type = 'mean' is not supported"),
        ("kimi-k2.5", {"pos_emb_type": "rope"}, "vision_config.pos_emb_type = 'rope' is not supported"),
        ("kimi-k2.5", {"projector_hidden_act": "silu"}, "projector_hidden_act = 'silu' is not supported"),
        ("kimi-k2.5", {"mm_projector_type": "linear"}, "vision_config.mm_projector_type = 'linear' is not supported"),
        ("kimi-k2.5", {"mm_projector_type": []}, "vision_config.mm_projector_type = [] is not supported"),
        ("kimi-k2.5", {"mm_hidden_size": 1024}, "mm_hidden_size = 1024 but the tower width is 1152"),
        ("kimi-k3", {"activation_func": "relu"}, "vision_config.activation_func = 'relu' is not supported"),
        ("kimi-k3", {"norm_type": "batchnorm"}, "vision_config.norm_type = 'batchnorm' is not layernorm or rmsnorm"),
        ("kimi-k3", {"pos_emb_interpolation_mode": "nearest"}, "'nearest' is not bicubic or bilinear"),
        ("kimi-k3", {"mlp_type": "swiglu"}, "vision_config.mlp_type = 'swiglu' is not supported"),
    ],
)
def test_fields_that_change_the_arithmetic(name: str, vision: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(raw(name, **vision))
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama"}, "model_type = 'llama' is not a Kimi vision model; known: kimi_vl, kimi_k25, kimi_k3"),
        ({}, "model_type = None"),
        ({"model_type": "kimi_k25", "text_config": {}}, "has no vision_config"),
        (SimpleNamespace(model_type="kimi_k3"), "has no vision_config"),
    ],
)
def test_configurations_that_are_of_something_else(config: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(config)
    assert said in caught.value.message


# ---- preprocessor_config.json ---------------------------------------------------------------------------------------


def test_settings_of_a_preprocessor_reach_the_rule() -> None:
    vl = family_config("kimi-vl")
    assert rule_from_dict(vl, {**PREPROCESSORS["kimi-vl"], "in_token_limit": 16384}) == replace(
        vl.rule, patch_limit=16384
    )
    assert rule_from_dict(vl, {"pad_input": False}) == replace(vl.rule, pad=False)
    k3 = family_config("kimi-k3")
    lowered = {"media_proc_cfg": {"in_patch_limit": 4096, "patch_limit_on_one_side": 64}}
    assert rule_from_dict(k3, lowered) == replace(k3.rule, patch_limit=4096, side_limit=64)


def k3_preprocessor(**changes: Any) -> dict[str, Any]:
    settings = copy.deepcopy(PREPROCESSORS["kimi-k3"]["media_proc_cfg"])
    for key, value in changes.items():
        if value is None:
            settings.pop(key)
        else:
            settings[key] = value
    return {"media_proc_cfg": settings}


def background(**changes: Any) -> dict[str, Any]:
    settings = dict(PREPROCESSORS["kimi-k3"]["media_proc_cfg"]["transparent_bg_config"])
    for key, value in changes.items():
        if value is None:
            settings.pop(key)
        else:
            settings[key] = value
    return settings


@pytest.mark.parametrize(
    "settings",
    [
        k3_preprocessor(patch_size=16),
        k3_preprocessor(merge_kernel_size=3),
        k3_preprocessor(image_mean=[0.48, 0.45, 0.4]),
        k3_preprocessor(image_std=[1.0, 1.0, 1.0]),
        k3_preprocessor(fixed_output_tokens=100),
        k3_preprocessor(transparent_bg_fill_stage="before_resize"),
        k3_preprocessor(transparent_bg_fill_stage=None),  # left out means before the resize
        k3_preprocessor(transparent_bg_config=background(pattern="black")),
        k3_preprocessor(transparent_bg_config=background(chessboard_square_size=None)),  # left out means 16
        k3_preprocessor(transparent_bg_config=background(chessboard_gray_value=200)),
        k3_preprocessor(transparent_bg_config="chessboard"),
        k3_preprocessor(in_patch_limit_each_frame="x"),
        k3_preprocessor(patch_limit_on_one_side=1024),
        k3_preprocessor(in_patch_limit=-1),
    ],
)
def test_settings_no_release_has_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        rule_from_dict(family_config("kimi-k3"), settings)


# ---- back to files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "kimi-vl-2506"])
def test_there_and_back(name: str) -> None:
    config = family_config(name)
    assert config_from_dict(*config_dicts(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        family_config("kimi-k2.5", rope_theta=500.0),
        family_config("kimi-k2.5", rule=ImageRule(token_limit=256)),
        family_config("kimi-k2.5", rule=ImageRule(alpha="drop")),
    ],
)
def test_what_the_files_cannot_say(config: VisionConfig) -> None:
    with pytest.raises(ConfigError, match="cannot express"):
        config_dicts(config)


def test_every_field_is_documented() -> None:
    for kind in (VisionConfig, ImageRule):
        for field in fields(kind):
            assert f"        {field.name}: " in (kind.__doc__ or "")


def test_the_row_of_the_demo_model_is_its_config() -> None:
    folder = default_model()
    raw, preprocessor = (
        json.loads((folder / name).read_text()) for name in ("config.json", "preprocessor_config.json")
    )
    assert family_config("demo") == config_from_dict(raw, preprocessor)
