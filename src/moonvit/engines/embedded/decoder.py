"""The text decoder: transformers' DeepSeek-V3 behind a small face, fed with embeddings.

Shape suffixes: S positions of a sequence, E language width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moonvit.engines.embedded.weights import load_text
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
    if not ({"rope_theta", "rope_parameters"} & set(text)):
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
    fields["routed_scaling_factor"] = float(fields["routed_scaling_factor"])
    if text.get("rope_parameters") is not None:
        rope = dict(text["rope_parameters"])
    else:
        rope = dict(text.get("rope_scaling") or {})
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
        model = _empty_model(text_fields(text), device, dtype)
        load_text(model, path, tied=tied, extra_layers=int(text.get("num_nextn_predict_layers") or 0))
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


def _empty_model(fields: Mapping[str, Any], device: torch.device | str, dtype: torch.dtype) -> Any:
    """The module with storage of the right kind and no values yet, but for the rotary frequencies."""
    try:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
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
    model.to_empty(device=device)
    # The frequencies are computed and not stored, and bfloat16 would spoil them.
    model.model.rotary_emb = DeepseekV3RotaryEmbedding(config).to(device)
    return model.eval().requires_grad_(False)
