"""The model families as data: one frozen ``VisionConfig`` and one row per family, read from every config dialect.

Three generations of the tower differ in a handful of fields, so they are rows of a table here and one model in
``moonvit.model``. Values: the released ``config.json`` and ``preprocessor_config.json`` files of Kimi-VL-A3B, Kimi-K2.5
and Kimi-K3; what those files leave to the modelling code (norm epsilon, RoPE base, GELU flavour) is stated here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from moonvit.errors import CheckpointError, ConfigError
from moonvit.grids import MAX_SIDE

PATCH = 14
"""Side of a patch in pixels; every released family has this one."""
PATCH_VALUES = 3 * PATCH * PATCH
"""Values of one patch (C = 588)."""
TORCH_RMS_EPS = 1.1920928955078125e-07
"""What ``nn.RMSNorm`` without an epsilon uses since torch 2.7: the float32 machine epsilon."""

Family = Literal["kimi-vl", "kimi-k2.5", "kimi-k3"]


_CHOICES: dict[str, tuple[str, ...]] = {
    "family": ("kimi-vl", "kimi-k2.5", "kimi-k3"),
    "norm": ("layernorm", "rmsnorm"),
    "pos_emb_mode": ("bicubic", "bilinear"),
    "projector": ("pre_norm", "post_norm"),
    "kind": ("navit", "kimi-vl"),
    "alpha": ("white", "chessboard", "drop"),
}


def _check_choice(name: str, value: Any) -> None:
    if value not in _CHOICES[name]:
        raise ConfigError(f"{name} = {value!r}, must be one of {', '.join(_CHOICES[name])}", param=name)


@dataclass(frozen=True)
class ImageRule:
    """How a family turns a picture size into a patch grid, and what it does with transparency.

    Attributes:
        kind: ``"navit"`` (K2.5 and K3: shrink by patches and by side, never refuse) or ``"kimi-vl"`` (shrink by
            patches only, refuse a padded side of 512 patches or more).
        patch_limit: Patches above which the picture is shrunk, counted before padding.
        side_limit: Patches along one side.
        pad: Pad to multiples of 28 pixels; if not, crop to multiples of 14 (Kimi-VL only).
        frame_patch_limit: ``patch_limit`` of one video frame; 0 where the family takes no video.
        alpha: ``"white"`` composites on white before the resize, ``"chessboard"`` on K3's 8-pixel chessboard after it,
            ``"drop"`` forgets alpha as the official Kimi-VL and K2.5 processors do.
        rgb_first: Pictures become RGB before the resize (K2.5); if not, after it (Kimi-VL, K3). It shows for modes that
            do not commute with resampling, such as CMYK.
        token_limit: A cap of one's own on the tokens of a picture, held after padding; None is the family's rule alone.
    """

    kind: Literal["navit", "kimi-vl"] = "navit"
    patch_limit: int = 16384
    side_limit: int = MAX_SIDE
    pad: bool = True
    frame_patch_limit: int = 4096
    alpha: Literal["white", "chessboard", "drop"] = "white"
    rgb_first: bool = True
    token_limit: int | None = None

    def __post_init__(self) -> None:
        whole: tuple[tuple[str, int, int | None], ...] = (
            ("patch_limit", 1, None),
            ("side_limit", 2, MAX_SIDE),
            ("frame_patch_limit", 0, None),
            ("token_limit", 1, None),
        )
        for name, least, most in whole:
            value = getattr(self, name)
            if value is None and name == "token_limit":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
                allowed = f"at least {least}" if most is None else f"{least} to {most}"
                raise ConfigError(f"{name} = {value!r}, allowed are whole numbers of {allowed}", param=name)
        for name in ("pad", "rgb_first"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} = {getattr(self, name)!r}, must be true or false", param=name)
        for name in ("kind", "alpha"):
            _check_choice(name, getattr(self, name))
        if not self.pad and self.kind != "kimi-vl":
            raise ConfigError("pad is false, but only Kimi-VL has a rule that crops", param="pad")
        if self.token_limit is not None and not self.pad:
            raise ConfigError(
                f"token_limit = {self.token_limit} needs a rule that pads: others crop", param="token_limit"
            )


@dataclass(frozen=True)
class VisionConfig:
    """Everything the tower, the projector and the preprocessor need to know about a model.

    Attributes:
        family: Row of the family table this model belongs to; decides checkpoint prefixes and prompts.
        hidden_size: Tower width D.
        intermediate_size: MLP width of a block.
        num_layers: Blocks.
        num_heads: Attention heads N.
        qkv_size: Width Q of q, of k and of v; N times the head dimension H.
        text_hidden_size: Language width E, the projector's output.
        norm: Norm of the tower: ``"layernorm"`` or ``"rmsnorm"``.
        norm_eps: Its epsilon.
        attn_bias: Biases on wqkv and wo.
        linear_bias: Biases on the MLP and the projector.
        patch_bias: Bias on the patch embedding.
        pos_emb_height: Rows of the learned position table.
        pos_emb_width: Columns of the learned position table.
        pos_emb_time: Rows of the fixed temporal table; 1 where the tower is two-dimensional.
        pos_emb_mode: How the position table is resampled: ``"bicubic"`` or ``"bilinear"``.
        projector: ``"pre_norm"`` (norm each patch, then merge and project) or ``"post_norm"`` (K3).
        projector_norm_eps: Epsilon of the projector's norm.
        rope_theta: RoPE base.
        rule: The picture rule.
    """

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    qkv_size: int
    text_hidden_size: int
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = 1e-5
    attn_bias: bool = True
    linear_bias: bool = True
    patch_bias: bool = True
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_time: int = 4
    pos_emb_mode: Literal["bicubic", "bilinear"] = "bicubic"
    projector: Literal["pre_norm", "post_norm"] = "pre_norm"
    projector_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rule: ImageRule = ImageRule()

    def __post_init__(self) -> None:
        for field in fields(self):  # their types are text here, from __future__
            name, value = field.name, getattr(self, field.name)
            if field.type == "int":
                least, most = (0, 1000) if name == "num_layers" else (1, 2**31 - 1)
                if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                    raise ConfigError(f"{name} = {value!r}, must be a whole number of {least} to {most}", param=name)
            elif field.type == "float" and not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ConfigError(f"{name} = {value!r}, must be a number above 0", param=name)
            elif name in _CHOICES:
                _check_choice(name, value)
            elif name == "rule" and not isinstance(value, ImageRule):
                raise ConfigError(f"rule = {value!r}, must be an ImageRule", param=name)
            elif field.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{name} = {value!r}, must be true or false", param=name)
        if self.qkv_size % self.num_heads or self.head_dim % 4:
            raise ConfigError(
                f"qkv_size = {self.qkv_size} over {self.num_heads} heads: the head dimension must be a multiple of 4",
                param="qkv_size",
            )

    @property
    def head_dim(self) -> int:
        """Width H of one head."""
        return self.qkv_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Width K of a merged token: 4 * D."""
        return 4 * self.hidden_size


FAMILIES: dict[Family, VisionConfig] = {
    "kimi-vl": VisionConfig(
        family="kimi-vl",
        hidden_size=1152,
        intermediate_size=4304,
        num_layers=27,
        num_heads=16,
        qkv_size=1152,
        text_hidden_size=2048,
        pos_emb_time=1,
        rule=ImageRule(kind="kimi-vl", patch_limit=4096, frame_patch_limit=0, rgb_first=False),
    ),
    "kimi-k2.5": VisionConfig(
        family="kimi-k2.5",
        hidden_size=1152,
        intermediate_size=4304,
        num_layers=27,
        num_heads=16,
        qkv_size=1152,
        text_hidden_size=7168,
    ),
    "kimi-k3": VisionConfig(
        family="kimi-k3",
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=27,
        num_heads=12,
        qkv_size=1536,
        text_hidden_size=7168,
        norm="rmsnorm",
        norm_eps=TORCH_RMS_EPS,
        attn_bias=False,
        linear_bias=False,
        patch_bias=False,
        pos_emb_mode="bilinear",
        projector="post_norm",
        rule=ImageRule(patch_limit=65536, frame_patch_limit=0, alpha="chessboard", rgb_first=False),
    ),
}

ALIASES: dict[str, Family] = {
    "kimi_vl": "kimi-vl",
    "kimi_k25": "kimi-k2.5",
    "kimi-k25": "kimi-k2.5",
    "kimi-k2.6": "kimi-k2.5",
    "kimi-k2.7": "kimi-k2.5",
    "kimi-k2.7-code": "kimi-k2.5",
    "kimi_k3": "kimi-k3",
}
"""Other spellings of a family: the ``model_type`` of its config.json, and releases that share its tower."""

VARIANTS: dict[str, VisionConfig] = {
    "kimi-vl-2506": replace(FAMILIES["kimi-vl"], rule=replace(FAMILIES["kimi-vl"].rule, patch_limit=16384)),
    "demo": replace(
        FAMILIES["kimi-k2.5"],
        hidden_size=192,
        intermediate_size=768,
        num_layers=6,
        num_heads=3,
        qkv_size=192,
        text_hidden_size=192,
    ),
}
"""Models that differ from the row of their family in some fields: a release of Kimi-VL, and the package's own model."""

PREFIXES: dict[Family, tuple[str, str]] = {
    "kimi-vl": ("vision_tower.", "multi_modal_projector."),
    "kimi-k2.5": ("vision_tower.", "mm_projector."),
    "kimi-k3": ("vision_tower.", "mm_projector."),
}
"""Checkpoint prefixes of the tower and of the projector."""


def family_config(name: str, **overrides: Any) -> VisionConfig:
    """The row of a family, with any field replaced.

    Args:
        name: A row of ``FAMILIES`` or ``VARIANTS``, or a spelling in ``ALIASES``.
        **overrides: Fields of ``VisionConfig``. Where ``hidden_size`` or ``num_heads`` is given and ``qkv_size`` is
            not, ``qkv_size`` follows ``hidden_size`` for the families in which they are equal.

    Returns:
        The configuration.

    Raises:
        ConfigError: The family or a field is unknown, or the fields contradict each other.
    """
    key = name.lower()
    rows = {str(row): config for row, config in (*FAMILIES.items(), *VARIANTS.items())}
    base = rows.get(ALIASES.get(key, key))
    if base is None:
        raise ConfigError(f"unknown model family {name!r}; known: {', '.join(rows)}", param="model")
    unknown = sorted(set(overrides) - {field.name for field in fields(VisionConfig)})
    if unknown:
        raise ConfigError(f"unknown configuration field(s): {', '.join(unknown)}", param=unknown[0])
    if "qkv_size" not in overrides and "hidden_size" in overrides and base.qkv_size == base.hidden_size:
        overrides["qkv_size"] = overrides["hidden_size"]
    return replace(base, **overrides)


# ---- config.json ----------------------------------------------------------------------------------------------------


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        file: Which.

    Returns:
        Its content.

    Raises:
        CheckpointError: It is not there, not JSON, or not an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds {type(content).__name__}, expected an object")
    return content


_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("vt_hidden_size", "hidden_size"),
    "intermediate_size": ("vt_intermediate_size", "intermediate_size"),
    "num_layers": ("vt_num_hidden_layers", "num_hidden_layers"),
    "num_heads": ("vt_num_attention_heads", "num_attention_heads"),
    "qkv_size": ("qkv_hidden_size",),
    "text_hidden_size": ("text_hidden_size",),
    "norm_eps": ("vision_norm_eps",),
    "attn_bias": ("attn_bias",),
    "linear_bias": ("linear_bias",),
    "patch_bias": ("patch_embed_proj_bias",),
    "norm": ("norm_type",),
    "pos_emb_height": ("init_pos_emb_height", "pos_emb_height"),
    "pos_emb_width": ("init_pos_emb_width", "pos_emb_width"),
    "pos_emb_time": ("init_pos_emb_time", "pos_emb_time"),
    "pos_emb_mode": ("pos_emb_interpolation_mode",),
    "projector_norm_eps": ("projector_ln_eps", "projection_layer_norm_eps"),
}
"""Field of ``VisionConfig`` -> the names it has in vision_config, official first."""

_FIXED: dict[str, tuple[Any, ...]] = {
    "patch_size": (PATCH,),
    "merge_kernel_size": (2, [2, 2], (2, 2)),
    "merge_type": ("sd2_tpool",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
    "projector_hidden_act": ("gelu",),
    "projection_hidden_act": ("gelu",),
    "activation_func": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "mlp_type": ("mlp2",),
}
"""Fields that change the arithmetic but have one value in every release: anything else is refused, not ignored."""

_PROJECTORS = {"patchmerger": "pre_norm", "patchmergerv2": "post_norm"}


def _get(source: Any, name: str) -> Any:
    if source is None:
        return None
    if isinstance(source, Mapping):
        return source.get(name)
    return getattr(source, name, None)


def _top(config: Any, name: str) -> Any:
    """A field that re-saved transformers checkpoints keep beside vision_config instead of in it."""
    return _get(config, name) if name.startswith("projection_") else None


def _agreed(found: dict[str, Any]) -> Any:
    """The one value several spellings of a field hold, None where there is none."""
    values = {key: value for key, value in found.items() if value is not None}
    if len({repr(value) for value in values.values()}) > 1:
        listed = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        raise ConfigError(f"the configuration contradicts itself: {listed}", param=next(iter(values)))
    return next(iter(values.values()), None)


def config_from_dict(config: Any, preprocessor: Mapping[str, Any] | None = None) -> VisionConfig:
    """Read a model's ``config.json``, as a mapping or as an object with the same attributes.

    Official names (``vt_hidden_size``), plain names (``hidden_size``) and the names of re-saved transformers
    checkpoints are understood, together where they agree.

    Args:
        config: The whole configuration, with ``model_type`` and ``vision_config``.
        preprocessor: The ``preprocessor_config.json``, where there is one.

    Returns:
        The vision configuration.

    Raises:
        ConfigError: The model type is not a Kimi vision model, two spellings disagree, or a field that would change
            the arithmetic has a value no release has.
    """
    model_type = _get(config, "model_type")
    family = ALIASES.get(str(model_type))
    if family is None:
        known = ", ".join(name for name in ALIASES if "_" in name)
        raise ConfigError(f"model_type = {model_type!r} is not a Kimi vision model; known: {known}", param="model_type")
    vision = _get(config, "vision_config")
    if vision is None:
        raise ConfigError(
            f"the {model_type} configuration has no vision_config: a text-only checkpoint has no tower to load",
            param="vision_config",
        )
    text = _get(config, "text_config")
    found: dict[str, Any] = {}
    for field, spellings in _SPELLINGS.items():
        names = {f"vision_config.{name}": _get(vision, name) for name in spellings}
        names |= {name: _top(config, name) for name in spellings}
        if field == "text_hidden_size":
            names["text_config.hidden_size"] = _get(text, "hidden_size")
        value = _agreed(names)
        if value is not None:
            found[field] = value
    rope_theta = _get(_get(vision, "rope_parameters"), "rope_theta")
    if rope_theta is not None:
        found["rope_theta"] = rope_theta
    for name, allowed in _FIXED.items():
        value = _agreed({f"vision_config.{name}": _get(vision, name), name: _top(config, name)})
        if value is not None and value not in allowed:
            raise ConfigError(
                f"vision_config.{name} = {value!r} is not supported; supported: {allowed[0]!r}", param=name
            )
    for field in ("norm", "pos_emb_mode"):
        spelling = _SPELLINGS[field][0]
        if field in found and found[field] not in _CHOICES[field]:
            choices = " or ".join(_CHOICES[field])
            raise ConfigError(f"vision_config.{spelling} = {found[field]!r} is not {choices}", param=spelling)
    kind = _get(vision, "mm_projector_type")
    if kind is not None:
        if not isinstance(kind, str) or kind not in _PROJECTORS:
            raise ConfigError(f"vision_config.mm_projector_type = {kind!r} is not supported", param="mm_projector_type")
        found["projector"] = _PROJECTORS[kind]
    if family == "kimi-vl":
        found.pop("pos_emb_time", None)
    for spelling in ("mm_hidden_size", "projection_hidden_size"):
        merged = _agreed({f"vision_config.{spelling}": _get(vision, spelling), spelling: _top(config, spelling)})
        width = found.get("hidden_size", FAMILIES[family].hidden_size)
        if merged is not None and merged != width:
            raise ConfigError(
                f"vision_config.{spelling} = {merged} but the tower width is {width}; they must be equal",
                param=spelling,
            )
    result = family_config(family, **found)
    return result if preprocessor is None else replace(result, rule=rule_from_dict(result, preprocessor))


def rule_from_dict(config: VisionConfig, preprocessor: Mapping[str, Any]) -> ImageRule:
    """Read a ``preprocessor_config.json`` into the picture rule of a model.

    Args:
        config: The model, for the family and the defaults.
        preprocessor: The file's content; its settings are at the top level (Kimi-VL) or under ``media_proc_cfg``.

    Returns:
        The rule.

    Raises:
        ConfigError: A setting has a value that would change the picture in a way no release does.
    """
    settings = preprocessor.get("media_proc_cfg", preprocessor)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"media_proc_cfg = {settings!r} is not an object", param="media_proc_cfg")
    allowed: dict[str, tuple[Any, ...]] = {
        "patch_size": (PATCH,),
        "merge_kernel_size": (2, [2, 2]),
        "image_mean": ([0.5, 0.5, 0.5],),
        "image_std": ([0.5, 0.5, 0.5],),
        "fixed_output_tokens": (None,),
        "temporal_merge_kernel_size": (4,),
        "transparent_bg_fill_stage": ("after_resize",),
    }
    for name, values in allowed.items():
        if name in settings and settings[name] not in values:
            raise ConfigError(
                f"preprocessor setting {name} = {settings[name]!r} is not supported; supported: {values[0]!r}",
                param=name,
            )
    names = {
        "patch_limit": ("in_patch_limit", "in_token_limit"),
        "side_limit": ("patch_limit_on_one_side",),
        "frame_patch_limit": ("in_patch_limit_each_frame",),
        "pad": ("pad_input",),
    }
    changes: dict[str, Any] = {}
    for field, spellings in names.items():
        value = _agreed({name: settings.get(name) for name in spellings})
        if value is not None:
            changes[field] = value
    background = settings.get("transparent_bg_config")
    if background is not None:
        released = {
            "pattern": "chessboard",
            "chessboard_square_size": 8,
            "chessboard_square_on_top_left": True,
            "chessboard_white_value": 255,
            "chessboard_gray_value": 180,
        }
        # Settings that are left out have other values in the official code than the released ones.
        if background != released or "transparent_bg_fill_stage" not in settings:
            raise ConfigError(
                f"transparent_bg_config = {background!r} at stage "
                f"{settings.get('transparent_bg_fill_stage', 'before_resize')!r} is not supported; supported: "
                f"{released!r} at stage 'after_resize'",
                param="transparent_bg_config",
            )
        changes["alpha"] = "chessboard"
    return replace(config.rule, **changes)


def config_dicts(config: VisionConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """A configuration in the schema of the official files, vision alone.

    Args:
        config: Which model.

    Returns:
        ``config.json`` and ``preprocessor_config.json``. Reading them back gives ``config`` again.

    Raises:
        ConfigError: It has a value those files have no field for.
    """
    model_type = {"kimi-vl": "kimi_vl", "kimi-k2.5": "kimi_k25", "kimi-k3": "kimi_k3"}[config.family]
    vision: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_kernel_size": [2, 2],
        "init_pos_emb_height": config.pos_emb_height,
        "init_pos_emb_width": config.pos_emb_width,
        "pos_emb_interpolation_mode": config.pos_emb_mode,
        "norm_type": config.norm,
        "vision_norm_eps": config.norm_eps,
        "qkv_hidden_size": config.qkv_size,
        "attn_bias": config.attn_bias,
        "linear_bias": config.linear_bias,
        "patch_embed_proj_bias": config.patch_bias,
        "mm_projector_type": "patchmerger" if config.projector == "pre_norm" else "patchmergerv2",
        "mm_hidden_size": config.hidden_size,
        "projector_ln_eps": config.projector_norm_eps,
        "text_hidden_size": config.text_hidden_size,
    }
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
    }
    vision |= sizes if config.family == "kimi-vl" else {f"vt_{name}": value for name, value in sizes.items()}
    rule, patches = config.rule, {"patch_size": PATCH, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if config.family == "kimi-vl":
        limits = {"merge_kernel_size": [2, 2], "in_token_limit": rule.patch_limit, "pad_input": rule.pad}
        preprocessor = patches | limits
    else:
        vision["init_pos_emb_time"] = config.pos_emb_time
        limits = {
            "merge_kernel_size": 2,
            "in_patch_limit": rule.patch_limit,
            "patch_limit_on_one_side": rule.side_limit,
        }
        if rule.frame_patch_limit:
            limits["in_patch_limit_each_frame"] = rule.frame_patch_limit
        preprocessor = {"media_proc_cfg": patches | limits}
    raw = {"model_type": model_type, "vision_config": vision}
    if config_from_dict(raw, preprocessor) != config:
        raise ConfigError(f"config.json cannot express {config}")
    return raw, preprocessor
