"""The text decoder: transformers' DeepSeek-V3 behind a small face, fed with embeddings.

Shape suffixes: S positions of a sequence, E language width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moonvit.engines.embedded.weights import find_text, load_text
from moonvit.errors import ConfigError, MissingDependencyError

TEXT_MODELS = ("kimi_k2", "deepseek_v3")
"""Values of ``text_config.model_type`` that are a DeepSeek-V3."""

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "n_shared_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "first_k_dense_replace",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Fields every release states. None is left to a default: those of transformers belong to another model."""
_OPTIONAL = ("num_key_value_heads", "attention_bias", "rope_interleave")
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
}
_ROPE_TYPES = ("default", "yarn")
_MOST_LAYERS = 1000
"""No release has a tenth of it; a module for each takes time even without weights."""


def text_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Read a ``text_config`` into the fields of transformers' ``DeepseekV3Config``.

    Args:
        text: As the checkpoint has it.

    Returns:
        Every field that changes the arithmetic.

    Raises:
        ConfigError: It is another architecture, lacks a field, or has a value that no release has.
    """
    kind = text.get("model_type")
    if kind not in TEXT_MODELS:
        raise ConfigError(
            f"text_config.model_type = {kind!r} is not supported by the embedded engine; supported: "
            f"{', '.join(TEXT_MODELS)}",
            param="text_config.model_type",
        )
    missing = [name for name in _REQUIRED if name not in text]
    if text.get("rope_theta") is None and text.get("rope_parameters") is None:
        missing.append("rope_theta")
    if missing:
        raise ConfigError(f"text_config lacks {', '.join(missing)}", param=f"text_config.{missing[0]}")
    for name, allowed in _FIXED.items():
        if text.get(name, allowed[0]) not in allowed:
            raise ConfigError(
                f"text_config.{name} = {text[name]!r} is not supported; supported: {allowed[0]!r}",
                param=f"text_config.{name}",
            )
    fields = {name: text[name] for name in (*_REQUIRED, *_OPTIONAL) if name in text}
    for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
        _whole(fields[name], name)
    _whole(fields["num_hidden_layers"], "num_hidden_layers", most=_MOST_LAYERS)
    for name in ("routed_scaling_factor", "rms_norm_eps"):
        value = fields[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ConfigError(f"text_config.{name} = {value!r}, must be a number above 0", param=f"text_config.{name}")
        fields[name] = float(value)
    kind = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    given = text.get(kind) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"text_config.{kind} = {given!r} is not an object", param=f"text_config.{kind}")
    rope = dict(given)
    if kind == "rope_scaling":
        rope.setdefault("rope_theta", text["rope_theta"])
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope["rope_type"] not in _ROPE_TYPES:
        raise ConfigError(
            f"rope type {rope['rope_type']!r} is not supported; supported: {', '.join(_ROPE_TYPES)}",
            param="text_config.rope_scaling",
        )
    fields["rope_parameters"] = rope
    return fields


class Decoder:
    """A text decoder with its weights.

    Args:
        model: transformers' ``DeepseekV3ForCausalLM``, in evaluation mode.

    Attributes:
        model: The same.
        width: Language width E.
        vocabulary: Ids it has embeddings for (V).
        max_context: Positions of prompt and answer together.
        parameters: Numbers in its weights.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.width: int = model.config.hidden_size
        self.vocabulary: int = model.config.vocab_size
        self.max_context: int = model.config.max_position_embeddings
        self.parameters = sum(parameter.numel() for parameter in model.parameters())

    @classmethod
    def from_directory(
        cls, path: str | Path, config: Mapping[str, Any], *, device: torch.device | str, dtype: torch.dtype
    ) -> Decoder:
        """Load the decoder of a checkpoint.

        Args:
            path: Directory with the official files.
            config: Its ``config.json``.
            device: Where it works.
            dtype: In what; the routing bias stays float32.

        Returns:
            The decoder.

        Raises:
            ConfigError: The text model is not a DeepSeek-V3, or has settings no release has.
            CheckpointError: The files do not hold exactly its tensors.
            MissingDependencyError: transformers is not installed.
        """
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError("the configuration has no text_config: there is no language model", param="text_config")
        tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
        extra = _whole(text.get("num_nextn_predict_layers") or 0, "num_nextn_predict_layers", least=0)
        model = _meta_model(text_fields(text), dtype)
        # Sizes that the files do not have are refused before memory is taken for them.
        found = find_text(model, path, tied=tied, extra_layers=extra)
        _give_storage(model, device)
        load_text(model, found)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return cls(model)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.model.lm_head.weight.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where it works."""
        return self.model.lm_head.weight.device  # type: ignore[no-any-return]

    def new_cache(self) -> Any:
        """An empty cache for one sequence."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """Embeddings of text tokens.

        Args:
            ids: Each below ``vocabulary``.

        Returns:
            (S, E) on the decoder's device.
        """
        rows: torch.Tensor = self.model.model.embed_tokens(torch.tensor(list(ids), device=self.device))
        return rows

    @torch.inference_mode()
    def extend(self, embeddings_SE: torch.Tensor, cache: Any) -> None:
        """Read positions that no token follows yet.

        Args:
            embeddings_SE: The next positions of the sequence.
            cache: What came before; grows by S.
        """
        self.model.model(inputs_embeds=embeddings_SE[None], past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def next_logits(self, embeddings_SE: torch.Tensor, cache: Any) -> torch.Tensor:
        """Read positions, and say what may follow the last one.

        Args:
            embeddings_SE: The next positions of the sequence.
            cache: What came before; grows by S.

        Returns:
            Logits, float32 (V) on the CPU.
        """
        output = self.model(inputs_embeds=embeddings_SE[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1].float().cpu()
        return logits


def _meta_model(fields: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The module on the meta device, in the dtypes it will have."""
    try:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
    except ImportError as error:
        raise MissingDependencyError("the embedded engine needs transformers: pip install 'moonvit[serve]'") from error
    try:
        # Ids of special tokens are not given: they belong to the chat format, and a padding id changes nothing here.
        config = DeepseekV3Config(**fields, tie_word_embeddings=False, pad_token_id=None)
        with torch.device("meta"):
            build: Any = DeepseekV3ForCausalLM
            model: Any = build(config)
    except Exception as error:
        raise ConfigError(f"transformers cannot build this text_config: {error}", param="text_config") from error
    model = model.to(dtype)
    for layer in model.model.layers:
        gate = getattr(layer.mlp, "gate", None)
        if gate is not None:
            gate.e_score_correction_bias = gate.e_score_correction_bias.float()
    return model.eval().requires_grad_(False)


def _give_storage(model: Any, device: torch.device | str) -> None:
    """Memory for the weights, without values yet, but for the rotary frequencies."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    model.to_empty(device=device)
    # The frequencies are computed and not stored, and bfloat16 would spoil them.
    model.model.rotary_emb = DeepseekV3RotaryEmbedding(model.config).to(device)


def _whole(value: Any, name: str, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"{least} to {most}"
        raise ConfigError(
            f"text_config.{name} = {value!r}, must be a whole number of {allowed}", param=f"text_config.{name}"
        )
    return value
