"""Packed weights: from the file to the model and back, multiplied, moved, planned for, and refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from moonvit.attention import this_machine
from moonvit.checkpoint import check_vision, load_tensors, load_vision, packable, packed_layers, save_vision
from moonvit.cli import app
from moonvit.compare import GATE, compare
from moonvit.deploy import deploy
from moonvit.encoder import VisionEncoder
from moonvit.errors import BudgetError, CheckpointError, ConfigError
from moonvit.families import FAMILIES, family_config
from moonvit.model import FLOAT_DTYPES, VisionModel
from moonvit.plan import PACKED_VALUES, Budget, make_plan, packed_rows
from moonvit.quantised import PACKED_DTYPES, PackedLinear, Unpacked, row_scales, scale_shapes, unpack, unpack_into
from moonvit.reference import features, max_relative_error
from tests.allocator import NARROW, REQUESTS, TINY, assert_held
from tests.packing import WAYS, Tensors, fp8_channel, fp8_tensor, in_words, model_of, pack, plain, state_of, wide_config
from tests.parity.cases import IMAGES, random_model, random_patches, tiny


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in PACKED_DTYPES else tensor


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some rows, so that narrow matrices have several."""
    monkeypatch.setattr("moonvit.plan.chunks.PACKED_VALUES", 6000)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_values")
@pytest.mark.parametrize("way", [*WAYS, "mixed"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_packed_file_gives_what_its_numbers_give(name: str, way: str, tmp_path: Path) -> None:
    config = wide_config(name)
    state = pack(state_of(random_model(config)), packable(config), way)
    save_file(state, tmp_path / "model.safetensors")
    model = load_vision(config, tmp_path)
    assert model.state_dict().keys() == state.keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(bits(tensor), bits(state[key]) if state[key].dtype in PACKED_DTYPES else state[key].float())
    patches, numbers = random_patches(IMAGES), model_of(config, plain(state))
    assert not numbers.packed and len(model.packed) == 6
    exact = features(plain(state), config, patches, IMAGES)
    for rows, groups in ((256, 1), (48, 1), (96, 4)):
        ours = model(patches, model.prepare(IMAGES, rows, groups))
        assert max_relative_error(ours, numbers(patches, numbers.prepare(IMAGES, rows, groups))) <= GATE
        assert max_relative_error(ours, exact) <= GATE


@pytest.mark.parametrize("where", ["projector", "tower", "one tensor", "everything", "nothing"])
def test_what_is_packed_is_decided_tensor_by_tensor(where: str, tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    among = {
        "projector": lambda name: "projector" in name,
        "tower": lambda name: "tower" in name,
        "one tensor": lambda name: name == "vision_tower.encoder.blocks.1.mlp.fc0.weight",
        "everything": lambda name: True,
        "nothing": lambda name: False,
    }[where]
    chosen = [name for name in packable(config) if among(name)]
    state = pack(state_of(random_model(config)), chosen, "mixed")
    save_file(state, tmp_path / "x.safetensors")
    patches = random_patches(IMAGES)
    numbers = model_of(config, plain(state))
    theirs = numbers(patches, numbers.prepare(IMAGES))
    everything = pack(state_of(random_model(config, seed=8)), packable(config), "int8_channel")
    for model in (config, random_model(config, seed=9), model_of(config, everything)):
        loaded = load_vision(model, tmp_path / "x.safetensors")
        layers = {name for name, layer in loaded.named_modules() if isinstance(layer, PackedLinear)}
        assert layers == {name.removesuffix(".weight") for name in chosen}
        assert loaded.state_dict().keys() == state.keys()
        assert max_relative_error(loaded(patches, loaded.prepare(IMAGES)), theirs) <= GATE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_each_number_once(dtype: torch.dtype) -> None:
    config = tiny("kimi-k3")
    state = pack(state_of(random_model(config)), packable(config), "mixed")
    model, numbers = model_of(config, state).to(dtype), model_of(config, plain(state)).to(dtype)
    exact = features(plain(state), config, random_patches(IMAGES), IMAGES)
    errors = []
    for one in (model, numbers):
        assert one.dtype == one.projector.dtype == dtype
        ours = one(random_patches(IMAGES), one.prepare(IMAGES))
        assert all(tensor.dtype == dtype for tensor in ours)
        errors.append(torch.cat([(a - b).flatten() for a, b in zip(ours, exact, strict=True)]).norm())
    assert errors[0] <= 1.1 * errors[1]


@pytest.fixture(params=[False, True], ids=["", "flushed"])
def flushed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once as it is, and once as libraries leave it that were built for speed: subnormal float32 are zero."""
    if not torch.set_flush_denormal(request.param):
        pytest.skip("this CPU cannot")
    assert (float(torch.tensor([2.0**-140]) * 2.0**120) == 0) == request.param
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushed")
@pytest.mark.parametrize("kind", PACKED_DTYPES)
def test_every_value_of_a_byte(kind: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = every.to(torch.int8).int()
    if kind == torch.float8_e4m3fn:
        sign, exponent, fraction = 1 - 2 * (every.int() >> 7), every.int() >> 3 & 15, every.int() & 7
        values = sign * torch.where(exponent == 0, fraction, (8 + fraction) << (exponent - 1).clamp(0))
    expected = values.double() / (512 if kind == torch.float8_e4m3fn else 1) * 3
    right = every & 127 != 127 if kind == torch.float8_e4m3fn else every == every
    for rows in (1, 2, 16, 256):
        found = unpack(every.view(kind).view(rows, -1), torch.tensor(3.0)).flatten()
        assert torch.equal(found[right], expected.float()[right])


def test_as_many_values_as_there_are() -> None:
    """The bits of some numbers are where others go: whatever their count, none is lost."""
    for count in (1, 2, 63, 64, 65, 127, 128, 129, 1000, 4097):
        values = torch.randint(0, 127, (1, count), dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert torch.equal(unpack(values, torch.tensor(1.0)), values.float())


def test_scales_have_the_shapes_of_files() -> None:
    assert scale_shapes(300, 200) == ((), (1,), (1, 1), (300,), (300, 1), (3, 2), (300, 2))
    for shape in scale_shapes(300, 200):
        scale = torch.rand(shape)
        packed = torch.randint(-128, 128, (300, 200), dtype=torch.int8)
        expected = plain({"a.weight": packed, "a.weight_scale": scale})["a.weight"]
        assert torch.equal(unpack(packed, scale), expected)
        assert torch.equal(unpack(packed, row_scales(scale, 300)), expected)
        for first, last in ((0, 128), (100, 129), (100, 300), (256, 257)):
            some = torch.empty(last - first, 200)
            assert torch.equal(unpack_into(packed, scale, first, last, some), expected[first:last])
    layer = PackedLinear(200, 300, torch.int8)
    for wrong, name in (((300, 3), "weight_scale"), ((2,), "weight_scale"), ((), "scale")):
        with pytest.raises(ConfigError, match="none of a matrix of 300 x 200"):
            layer.set_scale(torch.ones(wrong), name)


def test_compare_holds_packed_models_to_their_numbers() -> None:
    config = tiny("kimi-k2.5")
    state = pack(state_of(random_model(config)), packable(config), "mixed")
    for dtype in (torch.float32, torch.bfloat16):
        compare(model_of(config, state).to(dtype)).check()
    hidden = Unpacked(state)
    assert set(hidden) == set(plain(state)) and len(hidden) == len(plain(state))
    with pytest.raises(KeyError):
        hidden["mm_projector.proj.0.weight_scale"]


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [*WAYS, "mixed"])
@pytest.mark.parametrize("spelling", ["official", "transformers", "runtime"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_spelling_comes_back(name: str, spelling: Any, way: str, tmp_path: Path) -> None:
    """In transformers' spelling q and k are turned, and so are scales of their rows."""
    config = wide_config(name)
    model = model_of(config, pack(state_of(random_model(config)), packable(config), way))
    save_vision(model, tmp_path / "x.safetensors", spelling)
    back = load_vision(config, tmp_path / "x.safetensors")
    ours, theirs = (dict(Unpacked(one.state_dict())) for one in (model, back))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert {key for key in model.state_dict() if key.endswith(".weight_scale")} <= set(back.state_dict())


def test_thirds_that_were_packed_each_for_itself(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    save_vision(random_model(config), tmp_path / "plain.safetensors", "transformers")
    state = load_file(tmp_path / "plain.safetensors")
    thirds = [name for name in state if "_proj.weight" in name and ".attn." in name]
    assert len(thirds) == 3 * config.num_layers
    packed = dict(state)
    for index, name in enumerate(thirds):
        packed[name], packed[f"{name}_scale"] = (fp8_tensor, fp8_channel)[index % 2](state[name])
    numbers = plain(packed)
    ours, theirs = model_of(config, packed), model_of(config, numbers)
    unpacked = dict(Unpacked(ours.state_dict()))
    assert all(torch.equal(unpacked[name], tensor) for name, tensor in theirs.state_dict().items())


def test_scales_keep_their_name_and_activation_scales_are_passed_over(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    names = list(packable(config))
    state = pack(state_of(random_model(config)), names, "fp8_block", "weight_scale_inv")
    extra = {f"{name.removesuffix('weight')}input_scale": torch.ones(1) for name in names}
    save_file(state | extra, tmp_path / "x.safetensors")
    assert load_vision(config, tmp_path / "x.safetensors").state_dict().keys() == state.keys()
    again = load_vision(model_of(config, pack(state, [], "mixed")), tmp_path / "x.safetensors")
    assert again.state_dict().keys() == state.keys()


@pytest.mark.parametrize("spelling", ["official", "transformers", "runtime"])
@pytest.mark.parametrize("columns", [100, 102])
def test_four_values_in_a_word(columns: int, spelling: Any, tmp_path: Path) -> None:
    """W8A16 of compressed-tensors: q, k and v each for themselves too, and rows that no whole words hold."""
    config = tiny("kimi-k2.5", intermediate_size=columns)
    weights = model_of(config, pack(state_of(random_model(config)), packable(config), "int8_channel"))
    save_vision(weights, tmp_path / "values.safetensors", spelling)
    state = load_file(tmp_path / "values.safetensors")
    words = in_words(state)
    assert sum(name.endswith("weight_packed") for name in words) == sum(name.endswith("weight_scale") for name in state)
    save_file(words, tmp_path / "model.safetensors")
    ours, theirs = load_vision(config, tmp_path), load_vision(config, tmp_path / "values.safetensors")
    streamed = model_of(config, dict(reversed(words.items())))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor) and torch.equal(streamed.state_dict()[name], tensor)
    assert packed_layers(config, tmp_path) == ours.packed == {"wqkv", "wo", "fc0", "fc1", "first", "last"}
    assert [module.kind for module in ours.modules() if isinstance(module, PackedLinear)] == [torch.int8] * 14


def test_words_of_groups_and_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    first, last = "mm_projector.proj.0.", "mm_projector.proj.2."
    state = pack(state_of(random_model(config)), [f"{first}weight", f"{last}weight"], "int8_channel")
    state[f"{first}weight_scale"] = (torch.rand(288, 3) / 100).bfloat16()
    power = torch.randint(110, 128, (1, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    state[f"{last}weight_scale_inv"] = power
    del state[f"{last}weight_scale"]
    save_file(in_words(state), tmp_path / "x.safetensors")
    for model in (load_vision(config, tmp_path / "x.safetensors"), model_of(config, in_words(state))):
        for name, tensor in model_of(config, plain(state)).state_dict().items():
            assert torch.equal(Unpacked(model.state_dict())[name], tensor)


def test_what_is_said_of_activations_is_passed_over(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    state = pack(state_of(random_model(config)), packable(config), "fp8_tensor")
    for name in packable(config):
        for extra in ("input_scale", "activation_scale", "output_scale"):
            state[f"{name.removesuffix('weight')}{extra}"] = torch.ones(1)
        state[f"{name.removesuffix('weight')}input_zero_point"] = torch.ones(1, dtype=torch.int8)
    save_file(state, tmp_path / "x.safetensors")
    assert len(load_vision(config, tmp_path / "x.safetensors").packed) == 6


# ---- refusals -------------------------------------------------------------------------------------------------------


def refusal(state: Tensors, path: Path) -> str:
    save_file(state, path / "x.safetensors")
    config = tiny("kimi-k2.5")
    with pytest.raises(CheckpointError) as from_file:
        load_vision(config, path / "x.safetensors")
    with pytest.raises(CheckpointError) as streamed:
        load_tensors(VisionModel.empty(config), reversed(list(state.items())))
    assert "does not fit" in str(from_file.value) and "does not fit" in str(streamed.value)
    return str(from_file.value)


def test_weights_and_scales_come_in_pairs_and_all_faults_are_listed(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    block = "vision_tower.encoder.blocks.0"
    state = pack(state_of(random_model(config)), list(packable(config)), "int8_channel")
    del state[f"{block}.wo.weight_scale"]
    state[f"{block}.mlp.fc1.weight"] = torch.ones(72, 100)
    state[f"{block}.mlp.fc1.input_scale"] = torch.ones(1)
    state[f"{block}.wqkv.weight_scale_inv"] = torch.ones(1)
    state["mm_projector.proj.2.weight_scale"] = torch.ones(7)
    state["mm_projector.proj.0.weight_scale"] = torch.ones(1, dtype=torch.uint8)
    state["mm_projector.proj.0.weight_zero_point"] = torch.ones(288, dtype=torch.int8)
    state["vision_tower.encoder.blocks.1.mlp.fc0.weight"] = torch.ones(72, 100, dtype=torch.int8)
    del state["vision_tower.encoder.blocks.2.wo.weight"]
    message = refusal(state, tmp_path)
    for part in (
        f"2 missing: {block}.wo.weight_scale, vision_tower.encoder.blocks.2.wo.weight;",
        f"{block}.wqkv.weight_scale and {block}.wqkv.weight_scale_inv",
        "2 of a wrong shape: ",
        "mm_projector.proj.2.weight_scale is [7], expected one of [], [1], [1, 1], [48], [48, 1], [1, 3], [48, 3]",
        "vision_tower.encoder.blocks.1.mlp.fc0.weight is [72, 100], expected [100, 72]",
        "3 of scales without a packed weight: ",
        f"{block}.mlp.fc1.weight_scale",
        f"{block}.mlp.fc1.input_scale",
        "vision_tower.encoder.blocks.2.wo.weight_scale",
        "quantised in a way that is not supported: ",
        "mm_projector.proj.0.weight_scale (U8)",
        "mm_projector.proj.0.weight_zero_point (I8)",
    ):
        assert part in message, part


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.encoder.blocks.0.norm0.weight",
        "vision_tower.encoder.final_layernorm.weight",
        "mm_projector.pre_norm.weight",
        "vision_tower.encoder.blocks.0.wo.bias",
    ],
)
@pytest.mark.parametrize("kind", PACKED_DTYPES)
def test_only_linear_weights_may_be_packed(name: str, kind: torch.dtype, tmp_path: Path) -> None:
    state = state_of(random_model(tiny("kimi-k2.5")))
    state[name] = torch.ones(state[name].shape).to(kind)
    message = refusal(state, tmp_path)
    assert "1 quantised in a way that is not supported: " + name in message and "missing" not in message


def test_thirds_of_several_kinds_and_nan(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5")
    save_vision(random_model(config), tmp_path / "plain.safetensors", "transformers")
    state = load_file(tmp_path / "plain.safetensors")
    name = "model.vision_tower.layers.0.attn.k_proj.weight"
    assert "3 of one weight packed in different ways: " in refusal(pack(state, [name], "int8_channel"), tmp_path)
    name = "mm_projector.proj.0.weight"
    state = pack(state_of(random_model(config)), [name], "fp8_tensor")
    state[name].view(torch.uint8)[3, 3] = 255
    with pytest.raises(CheckpointError, match=f"{name} holds NaN"):
        model_of(config, state)


def test_words_that_are_not_eight_bits(tmp_path: Path) -> None:
    config, stem = tiny("kimi-k2.5"), "vision_tower.encoder.blocks.0.mlp.fc1."
    good = in_words(pack(state_of(random_model(config)), [f"{stem}weight"], "int8_channel"))

    def said(**changes: torch.Tensor | None) -> str:
        state = {**good, **{f"{stem}{name}": tensor for name, tensor in changes.items() if tensor is not None}}
        return refusal(
            {name: state[name] for name in state if changes.get(name.removeprefix(stem), ...) is not None}, tmp_path
        )

    nibbles = said(weight_packed=torch.ones(72, 13, dtype=torch.int32))
    assert f"3 quantised in a way that is not supported: {stem}weight_packed (I32)" in nibbles
    assert "missing" not in nibbles and "twice" not in nibbles
    assert f"1 missing: {stem}weight_shape" in said(weight_shape=None)
    assert f"{stem}weight_zero_point (I32)" in said(weight_zero_point=torch.ones(18, 1, dtype=torch.int32))
    assert f"{stem}weight_g_idx (I32)" in said(weight_g_idx=torch.ones(100, dtype=torch.int32))
    assert f"{stem}weight_shape is F32 [2], expected I64 [2]" in said(weight_shape=torch.tensor([72.0, 100.0]))
    both = said(weight=torch.ones(72, 100))
    assert "1 given twice: " in both and "quantised" not in both
    plain_values = pack(state_of(random_model(config)), [f"{stem}weight"], "int8_channel")
    assert f"1 unexpected: {stem}weight_shape" in refusal(
        plain_values | {f"{stem}weight_shape": torch.tensor([72, 100])}, tmp_path
    )
    save_vision(model_of(config, plain_values), tmp_path / "whole")
    save_file(good | {f"{stem}weight_shape": torch.tensor([72, 99])}, tmp_path / "whole" / "model.safetensors")
    for read in (check_vision, lambda path: load_vision(config, path)):
        with pytest.raises(CheckpointError, match=r"fc1\.weight_shape says \[72, 99\], expected \[72, 100\]"):
            read(tmp_path / "whole")


def test_faults_do_not_depend_on_the_order_of_a_file() -> None:
    config, stem = tiny("kimi-k2.5"), "mm_projector.proj.0."
    state = pack(state_of(random_model(config)), [f"{stem}weight"], "int8_channel")
    state[f"{stem}weight_zero_point"] = torch.ones(288, dtype=torch.int8)
    state[f"{stem}weight_packed"] = torch.ones(288, 36, dtype=torch.int32)
    del state["mm_projector.proj.2.weight"]
    items, said = list(state.items()), set()
    for seed in range(5):
        random.Random(seed).shuffle(items)
        with pytest.raises(CheckpointError) as caught:
            load_tensors(VisionModel.empty(config), items)
        assert "twice" not in str(caught.value) and "1 missing: mm_projector.proj.2.weight;" in str(caught.value)
        said.add("".join(sorted(str(caught.value))))
    assert len(said) == 1


def test_random_values_are_not_packed() -> None:
    config = tiny("kimi-k2.5")
    with pytest.raises(ConfigError, match=r"patch_embed\.proj is not a linear layer"):
        VisionModel.empty(config, packed={"vision_tower.patch_embed.proj": torch.int8})
    model = VisionModel.empty(config, packed={"mm_projector.proj.0": torch.int8})
    with pytest.raises(ConfigError, match="cannot be packed"):
        model.init_weights_(0)


# ---- moving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float16),
        lambda model: model.to("cpu", torch.bfloat16),
        lambda model: model.half().float().bfloat16(),
        lambda model: model.type(torch.bfloat16),
    ],
)
def test_a_cast_leaves_packed_bytes_alone(move: Callable[[VisionModel], VisionModel]) -> None:
    config = tiny("kimi-k2.5")
    state = pack(state_of(random_model(config)), list(packable(config)), "mixed")
    model = move(model_of(config, state))
    assert model.dtype == model.projector.dtype and model.dtype in (torch.float16, torch.bfloat16)
    for name, tensor in model.state_dict().items():
        if state[name].dtype in PACKED_DTYPES:
            assert torch.equal(bits(tensor), bits(state[name])) and tensor.dtype == state[name].dtype
        elif name.endswith("_scale"):
            assert tensor.dtype == torch.float32 and torch.equal(tensor, state[name].float())
        else:
            assert tensor.dtype == model.dtype
    empty = model.to_empty(device="meta")
    assert {name: tensor.dtype for name, tensor in empty.state_dict().items() if "proj.0" in name} == {
        "mm_projector.proj.0.weight": state["mm_projector.proj.0.weight"].dtype,
        "mm_projector.proj.0.weight_scale": torch.float32,
        "mm_projector.proj.0.bias": model.dtype,
    }


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_blocks_have_a_bound() -> None:
    for rows, columns in ((3456, 1152), (1152, 4304), (7168, 4608), (5, 3), (10, PACKED_VALUES * 2)):
        step = packed_rows(rows, columns)
        assert 1 <= step <= rows and (step == 1 or step * columns <= PACKED_VALUES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", [4000, PACKED_VALUES])
@pytest.mark.parametrize("name", list(TINY))
@torch.no_grad()
def test_the_plan_counts_what_is_unpacked(
    name: str,
    values: int,
    dtype: str,
    threads: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moonvit.plan.chunks.PACKED_VALUES", values)
    config = family_config(name, **NARROW, **TINY[name])
    state = state_of(random_model(config))
    layers = list(packable(config))
    ends = ("wqkv", "wo", "fc0", "fc1", "0", "2", "linear_1", "linear_2")
    # Each layer for itself in float32 and blocks as they are; all at once where a CPU may be slow, or blocks are many.
    whole = dtype != "float32" or values < PACKED_VALUES
    choices = [layers] if whole else [layers, *([one for one in layers if one.split(".")[-2] == end] for end in ends)]
    requests = (("several", 80),) if whole else (("one", 100), ("several", 80), ("one", 70))
    threads(1)
    for chosen in filter(None, choices):
        model = model_of(config, pack(state, chosen, "mixed")).to(getattr(torch, dtype))
        for request, share in requests:
            grids = REQUESTS[request]
            free = make_plan(config, grids, dtype=dtype, machine=this_machine(), packed=model.packed)
            plain_bytes = make_plan(config, grids, dtype=dtype, machine=this_machine()).workspace_bytes
            assert plain_bytes <= free.workspace_bytes <= plain_bytes + 8 * values
            budget = Budget(free.workspace_bytes * share // 100)
            try:
                plan = make_plan(config, grids, dtype=dtype, machine=this_machine(), budget=budget, packed=model.packed)
            except BudgetError:
                continue
            assert_held(model, plan)


def test_an_encoder_plans_for_its_packed_weights(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5", hidden_size=576, num_heads=8, num_layers=1)
    state = pack(state_of(random_model(config)), list(packable(config)), "int8_channel")
    save_vision(model_of(config, state), tmp_path)
    encoder = VisionEncoder.from_pretrained(tmp_path, dtype="float32")
    assert encoder.dtype == torch.float32
    without = make_plan(config, [(8, 8)], dtype="float32", machine=this_machine())
    assert encoder.plan([(1, 8, 8)]).workspace_bytes > without.workspace_bytes
    assert packed_layers(config, tmp_path) == encoder.model.packed == {"wqkv", "wo", "fc0", "fc1", "first", "last"}
    assert encoder.plan([(1, 8, 8)]).packed == ("fc0", "fc1", "first", "last", "wo", "wqkv")
    found = encoder.encode_patches(random_patches([(1, 8, 8)]), [(1, 8, 8)])
    assert found[0].dtype == torch.float32


def test_every_rank_unpacks_its_part() -> None:
    config, names = family_config("kimi-k2.5"), frozenset({"wqkv", "wo", "fc0", "fc1", "first", "last"})
    grids = [(1, 36, 36), (1, 20, 20)]
    for tp, dp in ((1, 1), (2, 1), (2, 2)):
        without, packed = (deploy(config, grids, tp=tp, dp=dp, packed=layers) for layers in (frozenset(), names))
        assert packed.to_dict()["tp"] == tp and packed.whole.to_dict()["packed"] == sorted(names)
        for one, other in zip(without.shares, packed.shares, strict=True):
            assert one.plan and other.plan and one.images == other.images
            grown = {name: other.plan.stages[name] - one.plan.stages[name] for name in one.plan.stages}
            changed = {name for name, bytes_ in grown.items() if bytes_}
            assert {"chunk", "projector"} <= changed <= {"attention", "chunk", "projector"}
            assert 0 < grown["projector"] <= PACKED_VALUES * 6 + 128


def planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    app(["plan", "--model", str(folder), "280x280", "--dtype", "float32", "--json"], standalone_mode=False)
    out, err = capsys.readouterr()
    return json.loads(out), err


def test_plan_reads_what_a_checkpoint_packs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny("kimi-k2.5", hidden_size=576, num_heads=8, num_layers=1)
    state = pack(state_of(random_model(config)), packable(config), "fp8_channel")
    save_vision(model_of(config, plain(state)), tmp_path)
    without, said = planned(tmp_path, capsys)
    assert without["packed"] == [] and not said
    (tmp_path / "model.safetensors").unlink()
    assert planned(tmp_path, capsys) == (without, "")
    save_file(state, tmp_path / "model.safetensors")
    document, said = planned(tmp_path, capsys)
    assert document["packed"] == ["fc0", "fc1", "first", "last", "wo", "wqkv"] and not said
    block = packed_rows(2304, 2304) * 2304 * 4 + 128
    assert document["stages"]["projector"] - without["stages"]["projector"] == block
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    document, said = planned(tmp_path, capsys)
    assert document == without
    assert said.startswith("moonvit: planned as if no weight were packed: ") and "cannot be read" in said
    with pytest.raises(CheckpointError, match="cannot be read"):
        packed_layers(config, tmp_path)
    index = {"weight_map": dict.fromkeys(state, "model-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="which is not there"):
        packed_layers(config, tmp_path)
    assert "which is not there" in planned(tmp_path, capsys)[1]


def test_no_whole_matrix_of_numbers_is_ever_made(tmp_path: Path) -> None:
    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.values: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if torch.is_tensor(tensor) and tensor.dtype in FLOAT_DTYPES and tensor.device.type == "cpu":
                    self.values.add(tensor.numel())
            return result

    config = tiny("kimi-k2.5", hidden_size=576, num_heads=8, num_layers=1)
    state = pack(state_of(random_model(config)), packable(config), "mixed")
    assert sum(state[name].numel() > PACKED_VALUES for name in packable(config)) == 3
    save_vision(model_of(config, state), tmp_path)
    grids = [(1, 4, 6), (1, 12, 2)]
    with Sizes() as sizes:
        model = load_vision(config, tmp_path, torch.bfloat16)
        model(random_patches(grids), model.prepare(grids))
    patch_embedding = config.hidden_size * 588
    assert {values for values in sizes.values if values > PACKED_VALUES} <= {patch_embedding}
    assert max(sizes.values - {patch_embedding}) > PACKED_VALUES // 2
    assert sum(tensor.nbytes for tensor in model.state_dict().values()) < 1.4 * sum(
        tensor.numel() for tensor in model.state_dict().values()
    )


def test_check_says_what_is_packed(tmp_path: Path) -> None:
    model = random_model(tiny("kimi-k2.5"))
    names = packable(model.config)
    state = pack(state_of(model), [name for name in names if "projector" in name], "fp8_tensor")
    state = pack(state, ["vision_tower.encoder.blocks.0.wo.weight"], "int8_channel")
    save_vision(model_of(model.config, state), tmp_path)
    report = check_vision(tmp_path)
    assert report["packed"] == "tower: 1 of 12 linear layers in I8; projector: 2 of 2 linear layers in F8_E4M3"
    assert report["dtypes"] == "F32, F8_E4M3, I8"
    numbers = load_file(tmp_path / "model.safetensors")
    save_file(numbers | {"mm_projector.proj.0.input_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    again = check_vision(tmp_path)
    assert again["tensors"] == report["tensors"] + 1
    assert again["parameters"] == report["parameters"] == sum(tensor.numel() for tensor in model.parameters())
    broken = load_file(tmp_path / "model.safetensors")
    broken["mm_projector.proj.2.weight"].view(torch.uint8)[0, 0] = 127
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hold NaN or infinity: mm_projector\.proj\.2\.weight$"):
        check_vision(tmp_path)
