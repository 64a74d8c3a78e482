"""Packed weights: from the file to the model and back, multiplied, moved, planned for, and refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonvit.attention import this_machine as machine
from moonvit.checkpoint import check_vision, load_tensors, load_vision, packable, packed_layers, save_vision
from moonvit.compare import GATE, compare
from moonvit.encoder import VisionEncoder
from moonvit.errors import CheckpointError, ConfigError
from moonvit.families import FAMILIES, VisionConfig, family_config
from moonvit.model import VisionModel
from moonvit.plan import PACKED_VALUES, Budget, make_plan, packed_rows
from moonvit.quantised import PACKED_DTYPES, PackedLinear, Unpacked, row_scales, scale_shapes, unpack
from moonvit.reference import features, max_relative_error
from tests.allocator import NARROW, REQUESTS, TINY, assert_held
from tests.parity.cases import IMAGES, random_model, random_patches, tiny

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def fp8_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def fp8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return (weight / scale.float()).to(torch.float8_e4m3fn), scale


def fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
    return (weight * 100).to(torch.float8_e4m3fn), scale / 100


def int8_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().to(torch.int8), scale


WAYS: dict[str, Pack] = {way.__name__: way for way in (fp8_tensor, fp8_channel, fp8_block, int8_channel)}


def pack(state: Tensors, names: Any, way: str, scale_name: str = "weight_scale") -> Tensors:
    """A state dict with some weights packed."""
    packed = dict(state)
    ways = list(WAYS.values()) if way == "mixed" else [WAYS[way]]
    for index, name in enumerate(names):
        packed[name], scale = ways[index % len(ways)](state[name])
        packed[name.removesuffix("weight") + scale_name] = scale
    return packed


def plain(packed: Tensors) -> Tensors:
    """The same with numbers in float32, by their definition."""
    numbers = {name: tensor for name, tensor in packed.items() if "_scale" not in name}
    for name, tensor in packed.items():
        if "_scale" in name:
            weight = name.rpartition(".")[0] + ".weight"
            rows, columns = packed[weight].shape
            scale = tensor.float().reshape(-1, 1) if tensor.ndim < 2 else tensor.float()
            if scale.shape[0] not in (1, rows):
                scale = scale.repeat_interleave(128, 0)[:rows]
            if scale.shape[1] != 1:
                scale = scale.repeat_interleave(128, 1)[:, :columns]
            numbers[weight] = packed[weight].float() * scale
    return numbers


def state_of(model: VisionModel) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def model_of(config: VisionConfig, state: Tensors) -> VisionModel:
    model = VisionModel.empty(config)
    load_tensors(model, state.items())
    return model


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in PACKED_DTYPES else tensor


def wide_config(name: str) -> VisionConfig:
    """Odd widths, wider than a block of scales."""
    widths = {"hidden_size": 144, "num_heads": 4, "intermediate_size": 300, "text_hidden_size": 200}
    return tiny(name, num_layers=2, **widths, **({"qkv_size": 192} if name == "kimi-k3" else {}))


@pytest.fixture
def few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some rows, so that narrow matrices have several."""
    monkeypatch.setattr("moonvit.plan.PACKED_VALUES", 6000)


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


def test_every_value_of_a_byte() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(16, 16)
    for kind in PACKED_DTYPES:
        values = every.view(kind)
        expected = values.float() * 3
        finite = expected.isfinite()
        assert torch.equal(unpack(values, torch.tensor(3.0))[finite], expected[finite])


def test_scales_have_the_shapes_of_files() -> None:
    assert scale_shapes(300, 200) == ((), (1,), (1, 1), (300,), (300, 1), (3, 2), (300, 2))
    for shape in scale_shapes(300, 200):
        scale = torch.rand(shape)
        packed = torch.randint(-128, 128, (300, 200), dtype=torch.int8)
        expected = plain({"a.weight": packed, "a.weight_scale": scale})["a.weight"]
        assert torch.equal(unpack(packed, scale), expected)
        assert torch.equal(unpack(packed, row_scales(scale, 300)), expected)


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


def test_random_values_are_not_packed() -> None:
    config = tiny("kimi-k2.5")
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
    monkeypatch.setattr("moonvit.plan.PACKED_VALUES", values)
    config = family_config(name, **NARROW, **TINY[name])
    state = state_of(random_model(config))
    layers = list(packable(config))
    ends = ("wqkv", "wo", "fc0", "fc1", "0", "2", "linear_1", "linear_2")
    choices = [layers, *([one for one in layers if one.split(".")[-2] == end] for end in ends)]
    threads(1)
    for chosen in filter(None, choices):
        model = model_of(config, pack(state, chosen, "mixed")).to(getattr(torch, dtype))
        for request, share in (("one", 100), ("several", 80), ("one", 70)):
            grids = REQUESTS[request]
            free = make_plan(config, grids, dtype=dtype, machine=machine(), packed=model.packed)
            plain_bytes = make_plan(config, grids, dtype=dtype, machine=machine()).workspace_bytes
            assert plain_bytes <= free.workspace_bytes <= plain_bytes + 8 * values
            budget = Budget(free.workspace_bytes * share // 100)
            try:
                plan = make_plan(config, grids, dtype=dtype, machine=machine(), budget=budget, packed=model.packed)
            except ConfigError:
                raise
            except Exception as error:
                assert "budget" in str(error)
                continue
            assert_held(model, plan)


def test_an_encoder_plans_for_its_packed_weights(tmp_path: Path) -> None:
    config = tiny("kimi-k2.5", hidden_size=576, num_heads=8, num_layers=1)
    state = pack(state_of(random_model(config)), list(packable(config)), "int8_channel")
    save_vision(model_of(config, state), tmp_path)
    encoder = VisionEncoder.from_pretrained(tmp_path, dtype="float32")
    assert encoder.dtype == torch.float32
    without = make_plan(config, [(8, 8)], dtype="float32", machine=machine())
    assert encoder.plan([(1, 8, 8)]).workspace_bytes > without.workspace_bytes
    assert packed_layers(config, tmp_path) == encoder.model.packed == {"wqkv", "wo", "fc0", "fc1", "first", "last"}
    assert packed_layers(config, tmp_path / "nothing") == frozenset()
    found = encoder.encode_patches(random_patches([(1, 8, 8)]), [(1, 8, 8)])
    assert found[0].dtype == torch.float32


def test_no_whole_matrix_of_numbers_is_ever_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("kimi-k2.5", hidden_size=576, num_heads=8, num_layers=1)
    save_vision(model_of(config, pack(state_of(random_model(config)), packable(config), "mixed")), tmp_path)
    made: list[tuple[tuple[int, ...], torch.dtype]] = []
    empty = torch.empty

    def watched(*shape: Any, **options: Any) -> torch.Tensor:
        result = empty(*shape, **options)
        made.append((tuple(result.shape), result.dtype))
        return result

    monkeypatch.setattr(torch, "empty", watched)
    model = load_vision(config, tmp_path, torch.bfloat16)
    model(random_patches(IMAGES), model.prepare(IMAGES))
    wide = [shape for shape, dtype in made if dtype == torch.float32 and len(shape) == 2]
    assert wide and all(rows * columns <= PACKED_VALUES for rows, columns in wide)
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
    broken = load_file(tmp_path / "model.safetensors")
    broken["mm_projector.proj.2.weight"].view(torch.uint8)[0, 0] = 127
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hold NaN or infinity: mm_projector\.proj\.2\.weight$"):
        check_vision(tmp_path)
