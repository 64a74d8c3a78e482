"""Text weights: official names to transformers' modules, strictly, and packed INT4."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import moonvit.engines.embedded.decoder as decoder_module
from moonvit.engines.embedded import weights
from moonvit.engines.embedded.decoder import Decoder, text_fields
from moonvit.engines.embedded.weights import official_name, places, unpack_int4
from moonvit.errors import CheckpointError, ConfigError
from tests import tiny


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    config = json.loads((folder / "config.json").read_text())
    return Decoder.from_directory(folder, config, device="cpu", dtype=dtype)


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint and write them as one shard."""
    tensors: tiny.Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    change(tensors)
    tiny.write_weights(folder, tensors, shards=1)


@pytest.mark.parametrize("write", [tiny.write_k25, tiny.write_vl], ids=["k25", "vl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_official_tensor_gets_to_its_place(write: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    written = {name: tensor for name, tensor in write(tmp_path).items() if name.startswith("language_model.")}
    found = places(load(tmp_path, dtype).model)
    assert set(found) == set(written)
    for name, tensor in written.items():
        # The routing bias decides between experts that are close; it keeps its precision.
        kept = torch.float32 if name.endswith("e_score_correction_bias") else dtype
        assert found[name].dtype == kept, name
        assert torch.equal(found[name], tensor.to(kept)), name


def test_experts_are_fused_as_transformers_fuses_them(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    tiny.write_k25(tmp_path)
    theirs, report = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32", output_loading_info=True)
    assert not any(report.values()), report
    ours = load(tmp_path).model.state_dict()
    expected = {f"model.{name}": tensor for name, tensor in theirs.model.language_model.state_dict().items()}
    expected["lm_head.weight"] = theirs.lm_head.weight
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name


def test_rotary_frequencies_are_those_of_transformers_in_every_dtype(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    tiny.write_k25(tmp_path)
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="float32").model.language_model.rotary_emb
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = load(tmp_path, dtype).model.model.rotary_emb
        assert ours.inv_freq.dtype == torch.float32
        assert torch.equal(ours.inv_freq, theirs.inv_freq)
        assert ours.attention_scaling == theirs.attention_scaling


def test_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_k25(tmp_path)
    handed: list[weakref.ref[torch.Tensor]] = []
    opened: list[str] = []
    real = weights.open_shard

    class Watched:
        def __init__(self, file: Path) -> None:
            self.shard = real(file)
            opened.append(file.name)

        def __enter__(self) -> Watched:
            self.inside = self.shard.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.shard.__exit__(*error)

        def get_tensor(self, name: str) -> torch.Tensor:
            assert all(one() is None for one in handed), "an earlier tensor is still alive"
            tensor: torch.Tensor = self.inside.get_tensor(name)
            handed.append(weakref.ref(tensor))
            return tensor

    monkeypatch.setattr(weights, "open_shard", Watched)
    decoder = load(tmp_path)
    assert len(handed) == len(places(decoder.model))
    assert len(opened) == len(set(opened)) == 2


def test_what_does_not_fit_is_listed_together_and_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_k25(tmp_path)
    stem = "language_model.model.layers.1."

    def change(tensors: tiny.Tensors) -> None:
        del tensors[f"{stem}mlp.experts.2.up_proj.weight"]
        del tensors["language_model.model.norm.weight"]
        tensors["language_model.model.surprise.weight"] = torch.zeros(2)
        tensors[f"{stem}mlp.experts.1.down_proj.weight"] = torch.zeros(3, 5)
        tensors["lm_head.weight"] = torch.zeros(tiny.VOCABULARY, tiny.WIDTH)
        tensors[f"{stem}self_attn.o_proj.weight"] = torch.zeros(64, 48, dtype=torch.int8)

    rewrite(tmp_path, change)
    monkeypatch.setattr(weights, "open_shard", lambda file: pytest.fail("a value was read"))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    message = str(caught.value)
    for piece in (
        "2 missing: ",
        f"{stem}mlp.experts.2.up_proj.weight",
        "language_model.model.norm.weight",
        "1 unexpected: language_model.model.surprise.weight",
        f"1 of a wrong shape: {stem}mlp.experts.1.down_proj.weight is [3, 5], expected [64, 32]",
        "1 given twice: ",
        "language_model.lm_head.weight",
        f"1 quantised otherwise than in packed INT4: {stem}self_attn.o_proj.weight (I8)",
    ):
        assert piece in message, piece


def test_layers_for_multi_token_prediction_are_passed_over_where_the_configuration_has_them(tmp_path: Path) -> None:
    tiny.write_k25(tmp_path, num_nextn_predict_layers=1)
    extra = {
        "language_model.model.layers.2.eh_proj.weight": torch.zeros(2, 2),
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    rewrite(tmp_path, lambda tensors: tensors.update(extra))
    load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    tiny.write_json(tmp_path / "config.json", config)
    with pytest.raises(CheckpointError, match=r"unexpected: language_model\.model\.layers\.2\.eh_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("given", "official"),
    [
        ("language_model.model.norm.weight", "language_model.model.norm.weight"),
        ("model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "language_model.model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("language_model.model.blocks.1.mlp.gate.weight", "language_model.model.layers.1.mlp.gate.weight"),
        ("model.language_model.lm_head.weight", "language_model.lm_head.weight"),
    ],
)
def test_spellings_of_names(given: str, official: str) -> None:
    assert official_name(given) == official


def test_a_checkpoint_saved_again_by_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    tiny.write_k25(tmp_path / "official")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "official", dtype="float32")
    model.save_pretrained(tmp_path / "again")
    first, again = load(tmp_path / "official").model.state_dict(), load(tmp_path / "again").model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_tied_output_matrix(tmp_path: Path) -> None:
    tiny.write_k25(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("language_model.lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"1 missing: language_model\.lm_head\.weight"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = True
    tiny.write_json(tmp_path / "config.json", config)
    model = load(tmp_path).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert bool(model.lm_head.weight.isfinite().all())


# ---- INT4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "values"),
    [
        (0xFEA98710, [-8, -7, -1, 0, 1, 2, 6, 7]),
        (0x5BBBBBBB, [3, 3, 3, 3, 3, 3, 3, -3]),
    ],
)
def test_int4_words_unpack_to_the_published_values(word: int, values: list[int]) -> None:
    signed = word - 2**32 if word >= 2**31 else word
    packed = torch.tensor([[signed]], dtype=torch.int32)
    assert unpack_int4(packed, torch.ones(1, 1), (1, 8)).tolist() == [values]
    assert tiny.pack_int4(torch.tensor([values], dtype=torch.int8)).tolist() == [[signed]]


def test_int4_scales_belong_to_groups_of_columns() -> None:
    values = torch.arange(2 * 64).view(2, 64) % 16 - 8
    scale = torch.tensor([[1.0, 0.5], [2.0, 0.25]], dtype=torch.bfloat16)
    expected = values.float() * scale.float().repeat_interleave(32, dim=1)
    assert torch.equal(unpack_int4(tiny.pack_int4(values.to(torch.int8)), scale, (2, 64)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_load_as_what_they_stand_for(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = tiny.write_k25(tmp_path, int4=True, dtype=dtype)
    names = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert sum(name.endswith("_packed") for name in names) == 12
    found = places(load(tmp_path, dtype).model)
    for name, place in found.items():
        assert torch.equal(place, plain[name].to(place.dtype)), name


def test_parts_of_a_packed_matrix_may_lie_in_two_files(tmp_path: Path) -> None:
    plain = tiny.write_k25(tmp_path, int4=True, shards=1)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}
    rest = {name: tensor for name, tensor in tensors.items() if name not in scales}
    save_file(rest, tmp_path / "model-00001-of-000002.safetensors")
    save_file(scales, tmp_path / "model-00002-of-000002.safetensors")
    weight_map = dict.fromkeys(rest, "model-00001-of-000002.safetensors")
    weight_map |= dict.fromkeys(scales, "model-00002-of-000002.safetensors")
    tiny.write_json(tmp_path / "model.safetensors.index.json", {"weight_map": weight_map})
    found = places(load(tmp_path).model)
    assert all(torch.equal(place, plain[name]) for name, place in found.items())


def test_packed_matrices_that_lack_a_part_or_do_not_fit_are_named(tmp_path: Path) -> None:
    tiny.write_k25(tmp_path, int4=True)
    expert = "language_model.model.layers.1.mlp.experts.0"
    rewrite(tmp_path, lambda tensors: tensors.pop(f"{expert}.up_proj.weight_scale"))
    with pytest.raises(CheckpointError, match=rf"1 missing: {expert}\.up_proj\.weight_scale"):
        load(tmp_path)
    shape = torch.tensor([32, 96], dtype=torch.int32)
    scale = torch.ones(32, 2, dtype=torch.bfloat16)
    rewrite(tmp_path, lambda tensors: tensors.update({f"{expert}.up_proj.weight_scale": scale}))
    load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({f"{expert}.gate_proj.weight_shape": shape}))
    with pytest.raises(
        CheckpointError, match=rf"{expert}\.gate_proj\.weight_shape says \[32, 96\], expected \[32, 64\]"
    ):
        load(tmp_path)
    rewrite(
        tmp_path,
        lambda tensors: tensors.update(
            {
                f"{expert}.gate_proj.weight_shape": torch.tensor([32, 64], dtype=torch.int32),
                f"{expert}.gate_proj.weight_packed": torch.zeros(32, 7, dtype=torch.int32),
            }
        ),
    )
    with pytest.raises(CheckpointError, match=rf"{expert}\.gate_proj\.weight: INT4 values .*\[32, 7\].*32 x 64"):
        load(tmp_path)


def test_a_matrix_both_plain_and_packed_or_with_other_bits_is_refused(tmp_path: Path) -> None:
    tiny.write_k25(tmp_path, int4=True)
    expert = "language_model.model.layers.1.mlp.experts.0"
    rewrite(tmp_path, lambda tensors: tensors.update({f"{expert}.up_proj.weight": torch.zeros(32, 64)}))
    with pytest.raises(CheckpointError, match=rf"quantised otherwise.*{expert}\.up_proj\.weight_packed"):
        load(tmp_path)

    def other_bits(tensors: tiny.Tensors) -> None:
        del tensors[f"{expert}.up_proj.weight"]
        tensors[f"{expert}.up_proj.weight_packed"] = torch.zeros(32, 32, dtype=torch.uint8)

    rewrite(tmp_path, other_bits)
    with pytest.raises(CheckpointError, match=rf"quantised otherwise.*{expert}\.up_proj\.weight_packed \(U8\)"):
        load(tmp_path)


def test_sizes_the_files_do_not_have_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.write_k25(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["vocab_size"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(decoder_module, "_give_storage", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(CheckpointError, match=r"of a wrong shape.*embed_tokens"):
        load(tmp_path)
    config["text_config"] |= {"vocab_size": 10, "num_nextn_predict_layers": "x"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"text_config\.num_nextn_predict_layers = 'x', must be a whole number"):
        load(tmp_path)


# ---- configuration --------------------------------------------------------------------------------------------------


def test_the_released_text_configurations_are_read() -> None:
    fields = text_fields(tiny.text_config())
    assert fields["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        **{name: value for name, value in tiny.YARN.items() if name != "type"},
    }
    assert text_fields(tiny.vl_config()["text_config"])["rope_parameters"] == {
        "rope_type": "default",
        "rope_theta": 800000.0,
    }
    kept = text_fields(tiny.text_config(quantization_config={"quant_method": "compressed-tensors"}))
    assert "quantization_config" not in kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "kimi_linear"}, "text_config.model_type = 'kimi_linear' is not supported"),
        ({"scoring_func": "softmax"}, "text_config.scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "text_config.topk_method = 'greedy'"),
        ({"moe_layer_freq": 2}, "text_config.moe_layer_freq = 2"),
        ({"hidden_act": "gelu"}, "text_config.hidden_act = 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": "yarn"}, "text_config.rope_scaling = 'yarn' is not an object"),
        ({"rope_parameters": [1]}, "text_config.rope_parameters = [1] is not an object"),
        ({"routed_scaling_factor": "x"}, "text_config.routed_scaling_factor = 'x', must be a number above 0"),
        ({"max_position_embeddings": 0}, "text_config.max_position_embeddings = 0, must be a whole number"),
        ({"num_hidden_layers": 10**6}, "text_config.num_hidden_layers = 1000000, must be a whole number of 1 to 1000"),
    ],
)
def test_settings_that_no_release_has_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        text_fields(tiny.text_config(**changes))
    assert message in str(caught.value)


def test_nothing_is_left_to_the_defaults_of_another_model() -> None:
    text = tiny.text_config()
    for name in ("n_group", "q_lora_rank", "rope_theta"):
        del text[name]
    with pytest.raises(ConfigError, match="text_config lacks n_group, q_lora_rank, rope_theta"):
        text_fields(text)
