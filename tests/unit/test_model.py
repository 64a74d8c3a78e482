"""The tower and the projector: names, arithmetic, independence of images, and what forward may not do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moonvit.errors import ConfigError, EmptyInputError, GridError, InvalidInputError
from moonvit.families import FAMILIES, VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.model import MLP, PositionTable, VisionModel, frame_table
from moonvit.reference import max_relative_error, positions
from tests.parity.cases import CLIPS, GATE, IMAGES, random_model, random_patches, tiny

FAMILY_NAMES = list(FAMILIES)
VIDEO_FAMILIES = [name for name in FAMILY_NAMES if FAMILIES[name].pos_emb_time > 1]


def encode(
    model: VisionModel, patches: torch.Tensor, grids: list[Any], rows: int = 256, groups: int = 1
) -> list[torch.Tensor]:
    return model(patches, model.prepare(grids, rows, groups))


@pytest.fixture(params=FAMILY_NAMES)
def model(request: pytest.FixtureRequest) -> VisionModel:
    return random_model(tiny(request.param))


# ---- names ----------------------------------------------------------------------------------------------------------


def _official(family: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released checkpoints, as their headers list them."""
    if family == "kimi-k3":
        block = {
            "norm0.weight": (1024,), "norm1.weight": (1024,), "wqkv.weight": (4608, 1024), "wo.weight": (1024, 1536),
            "mlp.fc0.weight": (4096, 1024), "mlp.fc1.weight": (1024, 4096),
        }  # fmt: skip
        rest = {
            "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
            "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
            "vision_tower.encoder.final_layernorm.weight": (1024,),
            "mm_projector.proj.0.weight": (4096, 4096),
            "mm_projector.proj.2.weight": (7168, 4096),
            "mm_projector.post_norm.weight": (7168,),
        }
    else:
        linears = {"wqkv": (3456, 1152), "wo": (1152, 1152), "mlp.fc0": (4304, 1152), "mlp.fc1": (1152, 4304)}
        block = {f"{name}.weight": shape for name, shape in linears.items()}
        block |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
        block |= {f"{norm}.{kind}": (1152,) for norm in ("norm0", "norm1") for kind in ("weight", "bias")}
        projector, first, last, width = (
            ("multi_modal_projector", "linear_1", "linear_2", 2048)
            if family == "kimi-vl"
            else ("mm_projector", "proj.0", "proj.2", 7168)
        )
        rest = {
            "vision_tower.patch_embed.proj.weight": (1152, 3, 14, 14),
            "vision_tower.patch_embed.proj.bias": (1152,),
            "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1152),
            "vision_tower.encoder.final_layernorm.weight": (1152,),
            "vision_tower.encoder.final_layernorm.bias": (1152,),
            f"{projector}.pre_norm.weight": (1152,),
            f"{projector}.pre_norm.bias": (1152,),
            f"{projector}.{first}.weight": (4608, 4608),
            f"{projector}.{first}.bias": (4608,),
            f"{projector}.{last}.weight": (width, 4608),
            f"{projector}.{last}.bias": (width,),
        }
    blocks = {f"vision_tower.encoder.blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()}
    return blocks | rest


@pytest.mark.parametrize(
    ("family", "tensors", "parameters"),
    [("kimi-vl", 335, 447_545_840), ("kimi-k2.5", 335, 471_143_920), ("kimi-k3", 168, 447_358_976)],
)
def test_state_dict_is_the_official_one(family: str, tensors: int, parameters: int) -> None:
    with torch.device("meta"):
        model = VisionModel(family_config(family))
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert state == _official(family)
    assert len(state) == tensors
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert not list(model.buffers())


def test_a_pass_leaves_nothing_on_the_model(model: VisionModel) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = {name for module in model.modules() for name, value in vars(module).items() if torch.is_tensor(value)}
    encode(model, random_patches(IMAGES), IMAGES)
    assert not list(model.buffers())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert tensors == {
        name for module in model.modules() for name, value in vars(module).items() if torch.is_tensor(value)
    }


def test_random_weights_follow_the_seed_and_not_the_dtype() -> None:
    config = tiny("kimi-k3")
    one, again, other = (random_model(config, seed=seed) for seed in (3, 3, 4))
    half = random_model(config, torch.bfloat16, seed=3)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor.bfloat16(), half.state_dict()[name])
        assert not torch.equal(tensor, other.state_dict()[name])


def test_random_features_stay_near_one_at_full_depth() -> None:
    for family in FAMILY_NAMES:
        features = encode(random_model(tiny(family, num_layers=27)), random_patches(IMAGES), IMAGES)
        assert 0.1 < torch.cat(features).std() < 10


def test_a_tower_of_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float64.*float32, bfloat16, float16"):
        VisionModel.empty(tiny("kimi-vl"), torch.float64)


# ---- positions ------------------------------------------------------------------------------------------------------


def _impulse(mode: str) -> torch.Tensor:
    table = PositionTable(tiny("kimi-vl", pos_emb_height=8, pos_emb_width=8, pos_emb_mode=mode))
    with torch.no_grad():
        table.weight.zero_()[4, 4] = 1.0
    return table.resample(16, 16, 0, 1)[8, 7:11, 0]


def test_positions_are_resampled_without_antialiasing() -> None:
    bicubic = torch.tensor([0.2300262, 0.7724762, 0.7724762, 0.2300262])
    torch.testing.assert_close(_impulse("bicubic"), bicubic, rtol=0, atol=1e-6)
    bilinear = torch.tensor([0.1875, 0.5625, 0.5625, 0.1875])
    torch.testing.assert_close(_impulse("bilinear"), bilinear, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_are_untouched_at_the_size_of_the_table(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = family_config("kimi-k2.5", hidden_size=128, num_heads=2, num_layers=0, pos_emb_mode=mode)
    table = random_model(config, dtype).vision_tower.patch_embed.pos_emb
    calls: list[Any] = []
    real = F.interpolate
    monkeypatch.setattr(F, "interpolate", lambda *args, **kwargs: calls.append(kwargs) or real(*args, **kwargs))
    assert torch.equal(table.resample(64, 64, 0, 128), table.weight)
    assert not calls
    table.resample(64, 62, 0, 128)
    assert calls == [{"size": (64, 62), "mode": mode}]


def test_frame_table_values() -> None:
    table = frame_table(4, 1152)
    assert table.dtype == torch.float32 and table.shape == (4, 1152)
    assert torch.equal(table[0], torch.cat((torch.zeros(576), torch.ones(576))))
    torch.testing.assert_close(table[1, :3], torch.tensor([0.841471, 0.8327947, 0.8240514]), rtol=1e-6, atol=0)
    torch.testing.assert_close(table[1, 576:579], torch.tensor([0.5403023, 0.55358195, 0.5665151]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_positions_of_a_pack(family: str) -> None:
    config = tiny(family, hidden_size=192, num_heads=4, qkv_size=192)  # more than one band of channels
    model = random_model(config)
    grids = [*IMAGES, *CLIPS[4], *CLIPS[2], IMAGES[0]]
    meta = model.prepare(grids)
    hidden = torch.zeros(meta.patches, config.hidden_size)
    with torch.no_grad():
        model.vision_tower.patch_embed.pos_emb.add_to_(hidden, meta)
        table = model.vision_tower.patch_embed.pos_emb.weight
        expected = torch.cat([positions(table, *grid, config.pos_emb_mode) for grid in grids])
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-6)
    assert meta.frame_TD is not None and meta.frame_TD.shape == (4, config.hidden_size)
    assert model.prepare(IMAGES).frame_TD is None


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
def test_one_frame_is_an_image_and_two_are_not_twice_one(family: str) -> None:
    model = random_model(tiny(family))
    patches = random_patches([(1, 4, 6)])
    image = encode(model, patches, [(4, 6)])[0]
    assert torch.equal(image, encode(model, patches, [Grid(1, 4, 6)])[0])
    still = encode(model, patches.repeat(2, 1), [(2, 4, 6)])[0]
    assert still.shape == image.shape
    assert max_relative_error([still], [image]) > 1e-3


# ---- arithmetic that is easy to get wrong ---------------------------------------------------------------------------


def test_merge_order() -> None:
    model = VisionModel(tiny("kimi-k2.5", hidden_size=4, num_heads=1, qkv_size=4))
    model.vision_tower.encoder.final_layernorm = torch.nn.Identity()
    meta = model.prepare([(1, 2, 2), (2, 4, 6)])
    hidden = torch.arange(4 + 48.0)[:, None].expand(-1, 4).contiguous()
    first = model.vision_tower.encoder.merge(hidden, meta.merge_index_M4[:1], meta.grids[0])
    assert first[0].view(4, 4)[:, 0].tolist() == [0, 1, 2, 3]
    second = model.vision_tower.encoder.merge(hidden, meta.merge_index_M4[1:], meta.grids[1])
    corners = [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11], [12, 13, 18, 19], [14, 15, 20, 21], [16, 17, 22, 23]]
    mean_over_frames = torch.tensor(corners) + 4 + 24 / 2
    assert second.view(6, 4, 4)[..., 0].tolist() == mean_over_frames.tolist()


def test_gelu_flavours() -> None:
    x = torch.linspace(-6, 6, 72)[None]
    mlp = MLP(tiny("kimi-vl", intermediate_size=72))
    with torch.no_grad():
        for linear in (mlp.fc0, mlp.fc1):
            linear.weight.copy_(torch.eye(72))
            linear.bias.zero_()
        assert (mlp(x) - F.gelu(x, approximate="tanh")).abs().max() < 1e-6
        assert (mlp(x) - F.gelu(x)).abs().max() > 4e-4

    model = random_model(tiny("kimi-k3", hidden_size=4, num_heads=1, qkv_size=4, text_hidden_size=16))
    first, last = model.projector.linears
    with torch.no_grad():
        first.weight.copy_(torch.eye(16))
        last.weight.copy_(torch.eye(16))
        model.projector.post_norm.weight.fill_(1.0)
    merged = torch.linspace(-6, 6, 16)[None]
    exact = F.rms_norm(F.gelu(merged), (16,), eps=1e-5)
    assert torch.equal(model.project(merged), exact)
    assert (exact - F.rms_norm(F.gelu(merged, approximate="tanh"), (16,), eps=1e-5)).abs().max() > 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_k3_norm_has_float32_epsilon_in_every_dtype(dtype: torch.dtype) -> None:
    norm = random_model(tiny("kimi-k3"), dtype).vision_tower.encoder.blocks[0].norm0
    assert norm.eps == 2**-23
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 1e-3).to(dtype)
    wide, weight = x.double(), norm.weight.double()
    by_hand = {eps: wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight for eps in (2**-23, 2**-7)}
    with torch.no_grad():
        assert max_relative_error([norm(x)], [by_hand[2**-23]]) < 2 * torch.finfo(dtype).eps
    assert max_relative_error([by_hand[2**-7]], [by_hand[2**-23]]) > 0.9


def test_rows_and_columns_are_not_interchangeable(model: VisionModel) -> None:
    patches = random_patches([(1, 4, 6)])
    tall = encode(model, patches.view(4, 6, 588).transpose(0, 1).reshape(24, 588), [(6, 4)])[0]
    wide = encode(model, patches, [(4, 6)])[0]
    assert max_relative_error([tall.view(3, 2, -1).transpose(0, 1).reshape(6, -1)], [wide]) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_and_normalised_patches_are_the_same(dtype: torch.dtype) -> None:
    model = random_model(tiny("kimi-k2.5"), dtype)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (sum(t * h * w for t, h, w in IMAGES), 3, 14, 14), generator=generator).byte()
    pixels.view(-1)[:256] = torch.arange(256).byte()
    normalised = (pixels.double() / 255).float().sub(0.5).mul(2)
    from_pixels = encode(model, pixels, IMAGES)
    for shape in (pixels.shape, (-1, 588)):
        from_floats = encode(model, normalised.view(shape), IMAGES)
        assert all(torch.equal(a, b) for a, b in zip(from_pixels, from_floats, strict=True))


def test_no_layers_is_a_model_too() -> None:
    features = encode(random_model(tiny("kimi-vl", num_layers=0)), random_patches(IMAGES), IMAGES)
    assert [tuple(f.shape) for f in features] == [(h * w // 4, 48) for _, h, w in IMAGES]


def test_the_reference_backend_agrees(model: VisionModel) -> None:
    patches = random_patches(IMAGES)
    slow = VisionModel(model.config, attention="reference")
    slow.load_state_dict(model.state_dict())
    assert max_relative_error(encode(slow, patches, IMAGES), encode(model, patches, IMAGES)) < GATE


# ---- independence of images -----------------------------------------------------------------------------------------

_grids = st.builds(
    lambda t, h, w: (t, 2 * h, 2 * w), st.sampled_from([1, 1, 1, 2, 3, 4]), st.integers(1, 7), st.integers(1, 7)
)
_configs = st.builds(
    lambda family, heads, head_dim, width, layers: family_config(
        family,
        hidden_size=4 * width,
        num_heads=heads,
        qkv_size=4 * heads * head_dim,
        intermediate_size=24,
        text_hidden_size=20,
        num_layers=layers,
        pos_emb_height=6,
        pos_emb_width=10,
        pos_emb_time=4,
    ),
    st.sampled_from(FAMILY_NAMES),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(2, 24),
    st.integers(0, 3),
)


@settings(max_examples=25, deadline=None)
@given(
    config=_configs,
    grids=st.lists(_grids, min_size=1, max_size=5),
    rows=st.integers(1, 300),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
def test_alone_among_others_in_any_order_and_any_chunks(
    config: VisionConfig, grids: list[tuple[int, int, int]], rows: int, seed: int, data: st.DataObject
) -> None:
    model = random_model(config, seed=seed)
    pictures = [random_patches([grid], seed + index) for index, grid in enumerate(grids)]
    alone = [encode(model, picture, [grid])[0] for picture, grid in zip(pictures, grids, strict=True)]
    groups = data.draw(st.sampled_from([n for n in range(1, 5) if config.num_heads % n == 0]))
    together = encode(model, torch.cat(pictures), grids, rows, groups)
    assert [f.shape for f in together] == [(Grid(*grid).tokens, 20) for grid in grids]
    assert max_relative_error(together, alone) < GATE
    again = encode(model, torch.cat(pictures), grids, rows, groups)
    assert all(torch.equal(a, b) for a, b in zip(together, again, strict=True))

    order = data.draw(st.permutations(range(len(grids))))
    shuffled = encode(model, torch.cat([pictures[i] for i in order]), [grids[i] for i in order], rows, groups)
    assert max_relative_error(shuffled, [alone[i] for i in order]) < GATE

    changed = data.draw(st.integers(0, len(grids) - 1))
    pictures[changed] = random_patches([grids[changed]], seed + 99) * 3
    for index, features in enumerate(encode(model, torch.cat(pictures), grids, rows, groups)):
        assert torch.equal(features, together[index]) == (index != changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_in_groups_give_the_same(model: VisionModel, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    patches, heads = random_patches(IMAGES), model.config.num_heads
    whole = encode(model, patches, IMAGES, 100)
    parts = encode(model, patches, IMAGES, 100, heads)
    assert max_relative_error(parts, whole) < (GATE if dtype == torch.float32 else 0.02)


def test_metadata_may_be_used_again(model: VisionModel) -> None:
    meta = model.prepare(IMAGES, 100)
    patches, others = random_patches(IMAGES), random_patches(IMAGES, seed=1)
    first = model(patches, meta)
    model(others, meta)
    assert all(torch.equal(a, b) for a, b in zip(first, model(patches, meta), strict=True))


def test_inputs_are_left_alone(model: VisionModel) -> None:
    patches = random_patches(IMAGES)
    before = patches.clone()
    encode(model, patches, IMAGES)
    assert torch.equal(patches, before)


def test_results_own_their_storage(model: VisionModel) -> None:
    features = encode(model, random_patches(IMAGES), IMAGES)
    for one in features:
        assert one.untyped_storage().nbytes() == one.nbytes
    assert len({one.untyped_storage().data_ptr() for one in features}) == len(features)


# ---- dtypes ---------------------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Notes conversions: row width, dtype before, dtype after."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((result.shape[-1], args[0].dtype, result.dtype))
        return result


INPUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given_dtype", INPUT_DTYPES)
def test_features_are_converted_only_where_they_differ(
    model: VisionModel, given_dtype: torch.dtype, computed: torch.dtype
) -> None:
    model = model.to(computed)
    merged = torch.randn(70, model.config.merged_size, generator=torch.Generator().manual_seed(0)).to(given_dtype)
    with Casts() as casts:
        features = model.project(merged, rows=32)
    width = model.config.merged_size
    expected = [] if given_dtype == computed else [(width, given_dtype, computed)] * 3
    assert [cast for cast in casts.seen if cast[0] == width] == expected
    assert features.dtype == computed and features.shape == (70, 48)
    assert torch.equal(features, model.project(merged.to(computed), rows=32))
    assert torch.equal(features, model.project(merged.view(70, 4, -1), rows=32))


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_features_come_in_the_dtype_asked_for(model: VisionModel, computed: torch.dtype, asked: torch.dtype) -> None:
    model = model.to(computed)
    patches, meta = random_patches(IMAGES), model.prepare(IMAGES)
    own, cast = model(patches, meta), model(patches, meta, asked)
    assert all(features.dtype == computed for features in own)
    assert all(features.dtype == asked for features in cast)
    assert all(torch.equal(a.to(asked), b) for a, b in zip(own, cast, strict=True))


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16])
def test_features_go_where_they_are_wanted(model: VisionModel, asked: torch.dtype) -> None:
    patches, meta = random_patches(IMAGES), model.prepare(IMAGES)
    expected = model(patches, meta, asked)
    room = [torch.full_like(features, torch.nan) for features in expected]
    given = model(patches, meta, out=room)
    assert all(a is b for a, b in zip(given, room, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    whole = torch.empty(sum(len(features) for features in expected), room[0].shape[1], dtype=asked)
    model(patches, meta, out=torch.split(whole, [len(features) for features in expected]))
    assert torch.equal(whole, torch.cat(expected))


def test_room_that_is_not_made_for_these_images_is_refused(model: VisionModel) -> None:
    patches, meta = random_patches(IMAGES), model.prepare(IMAGES)
    room = model(patches, meta)
    for wrong in ([], room[:-1], [*room[:-1], room[-1][:-1]]):
        with pytest.raises(InvalidInputError, match=r"out has shapes .* these images give") as caught:
            model(patches, meta, out=wrong)
        assert caught.value.param == "out"
    for dtype, wrong, said in (
        (torch.bfloat16, room, r"out is torch\.float32 on cpu: expected torch\.bfloat16 on cpu"),
        (None, [one.to("meta") for one in room], "on meta: expected floats on cpu"),
        (None, [one.int() for one in room], r"torch\.int32 on cpu: expected floats"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            model(patches, meta, dtype, wrong)


def test_a_projector_may_compute_in_another_dtype_than_its_tower(model: VisionModel) -> None:
    patches, meta = random_patches(IMAGES), model.prepare(IMAGES)
    plain = model(patches, meta)
    model.projector.to(torch.bfloat16)
    mixed = model(patches, meta)
    assert all(features.dtype == torch.bfloat16 for features in mixed)
    assert 1e-5 < max_relative_error(mixed, plain) < 0.05


# ---- what forward may not do ----------------------------------------------------------------------------------------


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("forward read a value from the device")


def test_forward_reads_nothing_back(model: VisionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    grids = [*IMAGES, *(CLIPS[4] if model.config.pos_emb_time > 1 else [])]
    meta, patches = model.prepare(grids, 50), random_patches(grids)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, _banned)
    features = model(patches, meta)
    monkeypatch.undo()
    assert all(torch.isfinite(one).all() for one in features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_runs_without_values(model: VisionModel, dtype: torch.dtype) -> None:
    model = model.to(dtype)
    grids = [*IMAGES, *(CLIPS[4] if model.config.pos_emb_time > 1 else [])]
    meta = model.prepare(grids, 50)
    pixels = torch.zeros(meta.patches, 588, dtype=torch.uint8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        features = model(mode.from_tensor(pixels), meta)
        assert [tuple(one.shape) for one in features] == [(Grid(*grid).tokens, 48) for grid in grids]
        assert all(one.dtype == dtype for one in features)
        with pytest.raises(DataDependentOutputException):
            features[0].sum().item()


@pytest.mark.parametrize("groups", [1, 3])
def test_only_hidden_keys_and_values_are_as_long_as_the_pack(groups: int) -> None:
    class Sizes(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.elements: dict[int, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if torch.is_tensor(tensor):
                    storage = tensor.untyped_storage()
                    self.elements[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
            return result

    config = tiny("kimi-k2.5", hidden_size=72, intermediate_size=288, num_heads=3)
    model = random_model(config)
    grids, rows = [(1, 64, 64)], 32
    meta, patches = model.prepare(grids, rows, groups), random_patches(grids)
    whole = {4096 * 72: "hidden, or attended rows of all heads", 4096 * 72 // groups: "keys or values of a group"}
    whole |= {1024 * 48: "features", 4096 * 588: "patches"}
    whole |= {parameter.numel(): "weight" for parameter in model.parameters()}
    whole |= {4096 * 64: "a band of positions"}
    with Sizes() as sizes:
        model(patches, meta)
    assert {size for size in sizes.elements.values() if size > rows * 4 * 588} <= whole.keys()


def test_training_mode_is_refused(model: VisionModel) -> None:
    meta = model.prepare([(2, 2)])
    model.train()
    with pytest.raises(InvalidInputError, match=r"inference-only.*eval"):
        model(random_patches([(1, 2, 2)]), meta)
    model.eval()
    features = model(random_patches([(1, 2, 2)]).requires_grad_(), meta)[0]
    assert not features.requires_grad


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_grids_are_checked_before_anything_is_made(model: VisionModel) -> None:
    with pytest.raises(EmptyInputError):
        model.prepare([])
    for bad, message in [
        ((3, 4), "h = 3"),
        ((4, 514), "w = 514.*512"),
        ((5, 4, 4), "t = 5.*4"),
        ((4,), "expected"),
        ((0, 4), "h = 0"),
    ]:
        with pytest.raises(GridError, match=f"grid 1: .*{message}"):
            model.prepare([(2, 2), bad])
    with pytest.raises(ConfigError, match="rows = 0"):
        model.prepare([(2, 2)], rows=0)
    with pytest.raises(ConfigError, match="groups = 7, must divide"):
        model.prepare([(2, 2)], groups=7)


def test_kimi_vl_takes_no_frames() -> None:
    with pytest.raises(GridError, match="grid 0: t = 2, but kimi-vl takes 1 to 1"):
        random_model(tiny("kimi-vl")).prepare([(2, 4, 4)])


def test_patches_must_be_those_of_the_grids(model: VisionModel) -> None:
    meta = model.prepare([(2, 2), (4, 6)])
    with pytest.raises(GridError, match="27 patches, but the grids ask for 28"):
        model(torch.zeros(27, 588), meta)
    for shape in ((28, 3, 14), (28, 587), (28, 14, 14, 3), (28,), (1, 28, 588)):
        with pytest.raises(GridError, match="588"):
            model(torch.zeros(shape), meta)
    with pytest.raises(InvalidInputError, match="int64"):
        model(torch.zeros(28, 588, dtype=torch.int64), meta)


def test_grids_may_come_as_rows_of_a_tensor(model: VisionModel) -> None:
    patches = random_patches([(1, 2, 4), (1, 4, 6)])
    expected = encode(model, patches, [(2, 4), (4, 6)])
    for grids in (torch.tensor([[2, 4], [4, 6]]), torch.tensor([[1, 2, 4], [1, 4, 6]])):
        for a, b in itertools.zip_longest(expected, encode(model, patches, grids)):
            assert torch.equal(a, b)
