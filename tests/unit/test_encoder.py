"""``VisionEncoder``: what it takes, what it gives, what it refuses before any work."""

from __future__ import annotations

import io
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moonvit import encoder as encoder_module
from moonvit.checkpoint import save_vision
from moonvit.encoder import Features, VisionEncoder
from moonvit.errors import (
    BudgetError,
    ConfigError,
    EmptyInputError,
    GridError,
    ImageError,
    InvalidInputError,
    MediaFetchError,
    NonFiniteError,
)
from moonvit.families import FAMILIES
from moonvit.grids import Grid
from moonvit.images import open_picture
from moonvit.plan import Budget
from moonvit.preprocess import patches_from, tokens_for
from moonvit.reference import max_relative_error
from tests.parity.cases import GATE, random_patches, tiny

FAMILY_NAMES = list(FAMILIES)
GRAPHS = "64MB"
SIZES = [(100, 60), (300, 200), (28, 28), (60, 100), (29, 400)]
SMALL = {
    "hidden_size": 48,
    "num_heads": 2,
    "intermediate_size": 64,
    "text_hidden_size": 40,
    "num_layers": 2,
    "pos_emb_height": 16,
    "pos_emb_width": 16,
}


def small(family: str, **options: Any) -> VisionEncoder:
    sizes = SMALL | ({"qkv_size": 48} if family == "kimi-k3" else {})
    return VisionEncoder.from_config(family, **sizes, **options)


@pytest.fixture(params=FAMILY_NAMES)
def enc(request: pytest.FixtureRequest) -> VisionEncoder:
    return small(request.param)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


PICTURES = [noise(*size, seed=index) for index, size in enumerate(SIZES)]


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything that costs fails the test."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("work was done before the request was checked")

    monkeypatch.setattr(encoder_module, "open_picture", fail)
    monkeypatch.setattr(encoder_module, "patches_from", fail)
    monkeypatch.setattr(encoder_module.VisionModel, "prepare", fail)
    monkeypatch.setattr(encoder_module.VisionModel, "forward", fail)


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_every_kind_of_picture_gives_the_same(enc: VisionEncoder, tmp_path: Path) -> None:
    picture = PICTURES[1]
    path = tmp_path / "page.png"
    path.write_bytes(png(picture))
    kinds = [picture, path, str(path), png(picture), np.asarray(picture), open_picture(picture)]
    alone = enc.encode(picture)
    assert len(alone) == 1
    for kind in kinds:
        (features,) = enc.encode(kind)
        assert isinstance(features, Features)
        assert features.source_size == (300, 200)
        assert torch.equal(features.tensor, alone[0].tensor)
    assert len(enc.encode(kinds)) == len(kinds)


def test_features_keep_order_rows_and_width(enc: VisionEncoder) -> None:
    features = enc.encode(PICTURES)
    assert [one.source_size for one in features] == SIZES
    assert [one.tokens for one in features] == [tokens_for(enc.config, *size) for size in SIZES]
    for one, picture in zip(features, PICTURES, strict=True):
        assert one.tensor.shape == (one.grid.tokens, 40) == (one.tokens, 40)
        assert one.tensor.dtype == enc.dtype == torch.float32
        assert one.tensor.untyped_storage().nbytes() == one.tensor.nbytes
        assert max_relative_error([one.tensor], [enc.encode(picture)[0].tensor]) <= GATE
    backwards = enc.encode(PICTURES[::-1])[::-1]
    assert max_relative_error([one.tensor for one in backwards], [one.tensor for one in features]) <= GATE
    again = enc.encode(tuple(PICTURES))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(features, again, strict=True))


def test_pictures_and_their_patches_give_the_same_bits(enc: VisionEncoder) -> None:
    made = [patches_from(picture, enc.config.rule) for picture in PICTURES]
    pack = np.concatenate([one.patches_LC for one in made])
    grids = [one.grid for one in made]
    expected = [one.tensor for one in enc.encode(PICTURES)]
    normalised = (pack.astype(np.float64) / 255).astype(np.float32)
    normalised = (normalised - np.float32(0.5)) * np.float32(2)
    for patches in (pack, torch.from_numpy(pack), torch.from_numpy(pack).view(-1, 3, 14, 14), normalised):
        for shapes in (grids, torch.tensor([list(grid) for grid in grids]), [tuple(grid) for grid in grids]):
            given = enc.encode_patches(patches, shapes)
            assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))
    assert torch.equal(enc.encode_patches(pack[: grids[0].patches], grids[0])[0], enc.encode(PICTURES[0])[0].tensor)


def test_height_and_width_alone_are_a_grid() -> None:
    enc = small("kimi-vl")
    patches = random_patches([(1, 4, 6), (1, 2, 2)])
    pairs, triples = (enc.encode_patches(patches, grids) for grids in ([(4, 6), (2, 2)], [(1, 4, 6), (1, 2, 2)]))
    assert [tuple(one.shape) for one in pairs] == [(6, 40), (1, 40)]
    assert all(torch.equal(a, b) for a, b in zip(pairs, triples, strict=True))


def test_one_grid_may_come_without_a_list(enc: VisionEncoder) -> None:
    patches = random_patches([(1, 4, 6)])
    [expected] = enc.encode_patches(patches, [Grid(1, 4, 6)])
    for grid in ((1, 4, 6), [4, 6], (np.int64(4), np.int64(6)), Grid(1, 4, 6)):
        assert torch.equal(enc.encode_patches(patches, grid)[0], expected)


def test_a_photo_of_12_megapixels() -> None:
    pixels = np.add.outer(np.arange(3000) // 12, np.arange(4000) // 16).astype(np.uint8)
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).convert("RGB").save(out, "JPEG", quality=90, exif=exif)
    encoder = small("kimi-vl", budget="64MiB")
    [features] = encoder.encode(out.getvalue())
    assert features.source_size == (3000, 4000)
    assert features.tokens == encoder.plan((3000, 4000)).tokens > 1000
    assert features.tensor.isfinite().all()


def test_numbers_of_numpy_are_sizes(enc: VisionEncoder) -> None:
    assert enc.plan([(np.int64(300), np.int32(200))]).grids == enc.plan((300, 200)).grids


def test_a_pass_of_a_plan_gives_the_same_as_the_whole_request(enc: VisionEncoder) -> None:
    plan = enc.plan(PICTURES)
    passes = [one for batch in plan.batches for one in enc.encode_batch(PICTURES, plan, batch)]
    assert len(plan.batches) > 1
    for one, expected in zip(passes, enc.encode(PICTURES), strict=True):
        assert torch.equal(one.tensor, expected.tensor) and one.source_size == expected.source_size


@pytest.mark.parametrize("device", ["tpu9", "cuda:99", "meta9", ""])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        small("kimi-vl", device=device)
    assert caught.value.param == "device"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_patches_may_be_of_any_floating_dtype(dtype: torch.dtype) -> None:
    enc = small("kimi-k2.5")
    patches = random_patches([(1, 4, 6)]).to(dtype)
    assert torch.equal(enc.encode_patches(patches, [(4, 6)])[0], enc.encode_patches(patches.float(), [(4, 6)])[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", torch.float16])
def test_features_come_in_the_encoders_dtype(dtype: Any) -> None:
    enc = small("kimi-k3", dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert enc.dtype == wanted
    assert [one.tensor.dtype for one in enc.encode(PICTURES[:2])] == [wanted] * 2


def test_pictures_live_no_longer_than_their_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    enc = small("kimi-k2.5")
    same = [noise(112, 112, seed) for seed in range(4)]
    assert [len(batch.indices) for batch in enc.plan(same).batches] == [1, 1, 1, 1]
    alive: list[weakref.ref[Any]] = []
    most = 0
    real = encoder_module.open_picture

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal most
        picture = real(*args, **kwargs)
        alive.append(weakref.ref(picture.image))
        most = max(most, sum(one() is not None for one in alive))
        return picture

    monkeypatch.setattr(encoder_module, "open_picture", watched)
    enc.encode([png(picture) for picture in same])
    assert len(alive) == 4
    assert most <= 2


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_plan_takes_sizes_pictures_and_grids(enc: VisionEncoder, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(png(PICTURES[1]))
    plan = enc.plan([(300, 200), path, str(path), png(PICTURES[1]), Grid(1, 36, 36), (1, 4, 6)])
    page = enc.encode(PICTURES[1])[0].grid
    assert list(plan.grids) == [page] * 4 + [Grid(1, 36, 36), Grid(1, 4, 6)]
    assert plan.tokens == 4 * page.tokens + 324 + 6
    assert plan.patches == 4 * page.patches + 1296 + 24
    for one in ((300, 200), [300, 200], path, Grid(*page), tuple(page)):
        assert list(enc.plan(one).grids) == [page]


def test_plan_decodes_and_runs_nothing(enc: VisionEncoder, tmp_path: Path, no_work: None) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(png(PICTURES[1]))
    assert enc.plan([path, (4000, 3000)]).peak_bytes > 0


def test_plan_counts_the_encoders_dtype() -> None:
    wide, half = (small("kimi-k2.5", dtype=dtype).plan((300, 200)) for dtype in ("float32", "bfloat16"))
    assert wide.output_bytes == 2 * half.output_bytes == wide.tokens * 40 * 4


# ---- refusals, all before any work ----------------------------------------------------------------------------------


def test_nothing_is_an_error(enc: VisionEncoder, no_work: None) -> None:
    for call in (
        lambda: enc.encode([]),
        lambda: enc.encode(()),
        lambda: enc.plan([]),
        lambda: enc.encode_patches(torch.zeros(0, 588), []),
        lambda: enc.encode_patches(torch.zeros(4, 588), []),
        lambda: enc.encode_patches(torch.zeros(0, 588), torch.zeros(0, 3, dtype=torch.int64)),
    ):
        with pytest.raises(EmptyInputError):
            call()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((3, 4), r"grid 1: h = 3 .*multiple of .* 2"),
        ((4, 514), r"grid 1: w = 514 .*2 to 512"),
        ((4, 513), r"grid 1: w = 513 .*2 to 512"),
        ((5, 4, 4), r"grid 1: t = 5.*1 to 4"),
        ((0, 4), r"grid 1: h = 0 .*2 to 512"),
        ((4, 4.0), r"grid 1: 4\.0"),
    ],
)
def test_bad_grids(enc: VisionEncoder, no_work: None, bad: tuple[Any, ...], message: str) -> None:
    with pytest.raises(GridError, match=message):
        enc.encode_patches(torch.zeros(20, 588), [(2, 2), bad])
    with pytest.raises(GridError):
        enc.plan([(28, 28), Grid(*bad) if len(bad) == 3 else Grid(1, *bad)])


def test_frames_where_there_is_no_temporal_table(no_work: None) -> None:
    enc = small("kimi-vl")
    for call in (lambda: enc.plan(Grid(2, 4, 4)), lambda: enc.encode_patches(torch.zeros(32, 588), [(2, 4, 4)])):
        with pytest.raises(GridError, match="grid 0: t = 2, but kimi-vl takes 1 to 1"):
            call()


def test_patches_that_do_not_match(enc: VisionEncoder, no_work: None) -> None:
    grids = [(2, 2), (4, 6), (2, 4)]
    with pytest.raises(GridError, match=r"grid 1: \(1, 4, 6\) needs 24 patches, rows 4 to 28, .*only 27 rows"):
        enc.encode_patches(torch.zeros(27, 588), grids)
    with pytest.raises(GridError, match=r"38 rows of patches, but the grids end at 36: 2 rows"):
        enc.encode_patches(torch.zeros(38, 588), grids)
    with pytest.raises(GridError, match="588"):
        enc.encode_patches(torch.zeros(36, 14, 14, 3), grids)


def test_an_unreadable_picture_fails_the_request_before_any_other_runs(enc: VisionEncoder, no_work: None) -> None:
    with pytest.raises(ImageError):
        enc.encode([PICTURES[0], b"not a picture"])


def test_over_budget_is_refused_with_both_numbers(no_work: None) -> None:
    with pytest.raises(BudgetError, match=r"image 0 of 4 patches .* the budget allows 1000"):
        small("kimi-k2.5", budget=Budget(1000))
    enc = small("kimi-k2.5", budget=Budget(100_000))
    for call in (
        lambda: enc.plan((300, 200)),
        lambda: enc.encode(PICTURES[1]),
        lambda: enc.encode_patches(random_patches([(1, 16, 22)]), [(16, 22)]),
    ):
        with pytest.raises(BudgetError, match="the budget allows 100000"):
            call()


def test_a_header_that_lies(enc: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "picture_size", lambda *args, **kwargs: (28, 28))
    with pytest.raises(ImageError, match=r"image 0: its header promises \(1, 2, 2\) patches, it decodes to"):
        enc.encode(png(PICTURES[1]))


def test_patches_that_are_no_patches(enc: VisionEncoder, no_work: None) -> None:
    for wrong in (np.zeros((4, 588), dtype=np.int64), [[0.0] * 588] * 4, np.zeros((4, 588), dtype=object), "patches"):
        with pytest.raises(InvalidInputError, match="expected a tensor, or an array of"):
            enc.encode_patches(wrong, [(2, 2)])
    with pytest.raises(InvalidInputError, match="int32"):
        enc.encode_patches(torch.zeros(4, 588, dtype=torch.int32), [(2, 2)])
    with pytest.raises(GridError, match="0 rows"):
        enc.encode_patches(torch.tensor(1.0), [(2, 2)])
    for empty in (torch.zeros(4, 588, device="meta"), torch.zeros(4, 588).to_sparse()):
        with pytest.raises(InvalidInputError, match="sparse or meta tensor"):
            enc.encode_patches(empty, [(2, 2)])
    for grids in (None, 5):
        with pytest.raises(GridError, match="expected a grid or a list of grids"):
            enc.encode_patches(torch.zeros(4, 588), grids)  # type: ignore[arg-type]


def test_arrays_that_torch_does_not_take_as_they_are(enc: VisionEncoder) -> None:
    patches = random_patches([(1, 2, 4)]).numpy()
    expected = enc.encode_patches(patches, [(2, 4)])[0]
    backwards = patches[::-1].copy()[::-1]
    frozen = patches.copy()
    frozen.flags.writeable = False
    for given in (backwards, frozen, np.asfortranarray(patches)):
        assert torch.equal(enc.encode_patches(given, [(2, 4)])[0], expected)


def test_a_size_no_rule_takes_is_named(enc: VisionEncoder, no_work: None) -> None:
    with pytest.raises(ImageError, match=r"image 1: .*0 x 20"):
        enc.plan([(28, 28), (0, 20)])
    with pytest.raises(ImageError, match=r"image 1: \(20\.5, 20\) is not a width and a height"):
        enc.plan([(28, 28), (20.5, 20)])
    if enc.config.family == "kimi-vl":
        with pytest.raises(ImageError, match=r"image 1: .*511") as caught:
            enc.plan([(28, 28), (20000, 1)])
        assert caught.value.param == "images[1]"


def test_an_address_is_asked_once(enc: VisionEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fetch(url: str, policy: Any, limits: Any, index: int) -> bytes:
        asked.append((url, policy, limits, index))
        return png(PICTURES[0])

    monkeypatch.setattr(encoder_module, "fetch_bytes", fetch)
    features = enc.encode([PICTURES[1], "https://pictures.example/a.png"])
    assert asked == [("https://pictures.example/a.png", None, enc.limits, 1)]
    assert torch.equal(features[1].tensor, enc.encode([PICTURES[1], PICTURES[0]])[1].tensor)


def test_addresses_are_refused_without_a_policy(enc: VisionEncoder, no_work: None) -> None:
    for call in (enc.encode, enc.plan):
        with pytest.raises(MediaFetchError, match="image 1"):
            call([PICTURES[0], "https://pictures.example/a.png"])


@pytest.mark.parametrize("wrong", ["float64", "int8", "bf16", torch.float64, None])
def test_unknown_dtypes(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        small("kimi-vl", dtype=wrong)
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        VisionEncoder.from_pretrained(tmp_path, dtype=wrong)


@pytest.mark.parametrize(("instructions", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_where_the_cpu_has_it(
    instructions: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions)
    assert small("kimi-k2.5", dtype="auto").dtype == expected


def test_unknown_fields() -> None:
    with pytest.raises(ConfigError, match="layers"):
        VisionEncoder.from_config("kimi-k3", layers=2)
    with pytest.raises(ConfigError, match="kimi-k9"):
        VisionEncoder.from_config("kimi-k9")


# ---- numbers that are none ------------------------------------------------------------------------------------------


def test_the_picture_with_a_nan_is_named(enc: VisionEncoder) -> None:
    grids = [(2, 2), (4, 6), (2, 4)]
    patches = random_patches([(1, h, w) for h, w in grids])
    patches[4 + 5, 100] = torch.nan
    with pytest.raises(NonFiniteError, match=r"image 1: .*NaN or infinity in torch\.float32") as caught:
        enc.encode_patches(patches, grids)
    assert caught.value.param == "images[1]"
    patches[4 + 5, 100] = 0.0
    assert all(torch.isfinite(one).all() for one in enc.encode_patches(patches, grids))


def test_a_nan_weight_is_found(enc: VisionEncoder) -> None:
    with torch.no_grad():
        enc.model.vision_tower.encoder.blocks[1].wo.weight[3, 3] = torch.nan
    with pytest.raises(NonFiniteError, match="image 0"):
        enc.encode(PICTURES[:2])


def test_an_overflow_of_float16_is_found() -> None:
    enc = small("kimi-k2.5", dtype="float16")
    with torch.no_grad():
        enc.model.projector.linears[1].weight.mul_(30000)
    with pytest.raises(NonFiniteError, match=r"torch\.float16"):
        enc.encode(PICTURES[0])


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_from_pretrained_is_the_saved_model(enc: VisionEncoder, tmp_path: Path) -> None:
    save_vision(enc.model, tmp_path / "model")
    loaded = VisionEncoder.from_pretrained(tmp_path / "model", dtype="float32")
    assert loaded.config == enc.config
    for a, b in zip(enc.encode(PICTURES), loaded.encode(PICTURES), strict=True):
        assert torch.equal(a.tensor, b.tensor) and a.grid == b.grid
    assert VisionEncoder.from_pretrained(str(tmp_path / "model"), dtype="bfloat16").dtype == torch.bfloat16


def test_bfloat16_weights_run_in_every_dtype(tmp_path: Path) -> None:
    enc = small("kimi-k3", dtype="bfloat16")
    save_vision(enc.model, tmp_path)
    exact = [one.tensor for one in VisionEncoder.from_pretrained(tmp_path, dtype="float32").encode(PICTURES)]
    for dtype, bound in (("bfloat16", 0.05), ("float16", 0.01)):
        features = [one.tensor for one in VisionEncoder.from_pretrained(tmp_path, dtype=dtype).encode(PICTURES)]
        assert max_relative_error(features, exact) < bound


def test_the_seed_is_the_model() -> None:
    one, again, other = (small("kimi-k2.5", seed=seed).encode(PICTURES[0])[0].tensor for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    for wrong in ("a", 2**70, -1, 1.5, True):
        with pytest.raises(ConfigError, match="seed = "):
            small("kimi-k2.5", seed=wrong)


def test_a_model_of_ones_own_can_be_wrapped() -> None:
    model = encoder_module.VisionModel(tiny("kimi-vl")).init_weights_(0)
    enc = VisionEncoder(model, budget="256MiB")
    assert enc.encode(PICTURES[0])[0].tensor.shape[1] == 48
    assert isinstance(enc.budget, Budget)


# ---- caches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_positions_are_the_same_bits_kept_or_not(family: str, dtype: str) -> None:
    cold, warm = (small(family, dtype=dtype, position_cache=size) for size in (0, "1MiB"))
    grids = [Grid(1, 4, 6), Grid(1, 8, 8), Grid(1, 4, 6), Grid(1, 16, 16)]
    if cold.config.pos_emb_time > 1:
        grids.append(Grid(3, 4, 6))
    patches = random_patches(grids)
    expected = cold.encode_patches(patches, grids)
    for _ in range(2):
        found = warm.encode_patches(patches, grids)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    size = warm.model.dtype.itemsize * warm.config.hidden_size
    assert warm._positions.keys() == [(8, 8), (4, 6)] or warm._positions.keys() == [(4, 6), (8, 8)]
    assert warm._positions.bytes == (4 * 6 + 8 * 8) * size
    assert (len(cold._positions), cold._positions.bytes) == (0, 0)


def test_positions_stay_within_their_bytes() -> None:
    enc = small("kimi-k2.5", position_cache=48 * 4 * 100)
    for side in (2, 4, 6, 8, 12, 4):
        enc.encode_patches(torch.zeros(side * side, 588, dtype=torch.uint8), [(side, side)])
        assert enc._positions.bytes <= 48 * 4 * 100
    assert enc._positions.keys() == [(8, 8), (4, 4)]  # 12 x 12 never fits and drops nothing


@pytest.mark.parametrize("cache", ["position_cache", "feature_cache"])
def test_new_weights_are_seen_by_caches(cache: str) -> None:
    enc, other = (small("kimi-k2.5", seed=seed, **{cache: "1MiB"}) for seed in (0, 1))
    picture = noise(60, 40)
    before = enc.encode(picture)[0].tensor
    enc.model.load_state_dict(other.model.state_dict())
    after = enc.encode(picture)[0].tensor
    assert torch.equal(after, other.encode(picture)[0].tensor)
    assert not torch.equal(after, before)
    with torch.no_grad():
        enc.model.vision_tower.patch_embed.pos_emb.weight.zero_()
        other.model.vision_tower.patch_embed.pos_emb.weight.zero_()
    assert torch.equal(enc.encode(picture)[0].tensor, other.encode(picture)[0].tensor)


def test_features_are_kept_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    run = VisionEncoder._run
    monkeypatch.setattr(
        VisionEncoder,
        "_run",
        lambda self, pack, grids, made: passes.append(len(grids)) or run(self, pack, grids, made),
    )
    pictures = [noise(60, 40, seed) for seed in range(3)]
    plain = small("kimi-k3")
    expected = [plain.encode(picture)[0].tensor for picture in pictures]
    plain.encode(pictures[0])
    assert passes == [1, 1, 1, 1]
    kept = small("kimi-k3", feature_cache="1MiB")
    passes.clear()
    first = kept.encode(pictures[0])[0]
    first.tensor.zero_()  # what was given out is the caller's alone
    for _ in range(2):
        found = kept.encode(pictures[0])[0]
        assert torch.equal(found.tensor, expected[0]) and found.source_size == (60, 40)
        found.tensor.fill_(7.0)
    assert passes == [1]
    mixed = kept.encode([pictures[1], pictures[0], pictures[2]])
    assert sum(passes) == 3
    for features, index in zip(mixed, (1, 0, 2), strict=True):
        assert max_relative_error(features.tensor, expected[index]) <= GATE
    kept.clear_caches()
    kept.encode(pictures[0])
    assert sum(passes) == 4


def test_the_same_bytes_as_another_picture_are_another_picture() -> None:
    enc = small("kimi-k2.5", feature_cache="1MiB")
    data = np.random.default_rng(0).integers(0, 256, 60 * 40 * 3, dtype=np.uint8).tobytes()
    wide, tall = (Image.frombytes("RGB", size, data) for size in ((60, 40), (40, 60)))
    grey = Image.frombytes("L", (60, 40 * 3), data)
    for picture in (wide, tall, grey):
        assert torch.equal(enc.encode(picture)[0].tensor, small("kimi-k2.5").encode(picture)[0].tensor)


def test_features_stay_within_their_bytes() -> None:
    enc = small("kimi-k2.5", feature_cache=2000)
    for seed in range(4):
        enc.encode(noise(56, 56, seed))  # 4 tokens of 40 float32 values: 640 bytes
        assert enc._features.bytes <= 2000
    assert enc._features.bytes == 3 * 640
    enc.encode(noise(280, 280))
    assert enc._features.bytes == 3 * 640


@pytest.mark.parametrize("name", ["position_cache", "feature_cache"])
@pytest.mark.parametrize("value", [-1, "lots", 1.5, "auto"])
def test_cache_sizes_that_cannot_be(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} = .*at least 0"):
        small("kimi-k2.5", **{name: value})


def test_plans_count_what_caches_hold() -> None:
    enc = small("kimi-k2.5", position_cache="1MiB", feature_cache="1MiB")
    picture = noise(60, 40)
    plan = enc.plan(picture)
    assert plan.stages["cached"] == plan.patches * 48 * 4 + plan.output_bytes
    assert plan.stages["decoded"] == 20 * 60 * 40
    enc.encode(picture)
    assert enc._positions.bytes + enc._features.bytes == plan.stages["cached"]


# ---- closing --------------------------------------------------------------------------------------------------------


def test_closing_gives_the_memory_back() -> None:
    with small("kimi-k2.5", feature_cache="1MiB") as enc:
        kept = enc.encode(noise(60, 40))[0].tensor
        held = [weakref.ref(value) for value in (*enc.model.parameters(), enc._positions.get((4, 6)))]
        values = kept.clone()
    assert not any(reference() is not None for reference in held)
    assert enc._features.bytes == enc._positions.bytes == 0
    assert torch.equal(kept, values)
    for use in (lambda: enc.encode(noise(60, 40)), lambda: enc.plan((60, 40)), lambda: enc.dtype):
        with pytest.raises(InvalidInputError, match="this encoder is closed"):
            use()
    enc.close()


# ---- CUDA graphs ----------------------------------------------------------------------------------------------------


def test_graphs_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="graph_cache = 64000000: cpu has no CUDA graphs"):
        small("kimi-vl", graph_cache=GRAPHS)
    assert small("kimi-vl", graph_cache=0).encode(PICTURES[0])


def test_graphs_run_the_blocks_are_in_the_plan_and_go_with_the_caches() -> None:
    enc, plain = small("kimi-k2.5"), small("kimi-k2.5")
    packs: list[int] = []

    class Graphs:
        max_bytes = 1000
        cleared = 0

        def __call__(self, hidden_LD: torch.Tensor, meta: Any) -> None:
            packs.append(meta.patches)
            enc.model.vision_tower.encoder(hidden_LD, meta)

        def clear(self) -> None:
            Graphs.cleared += 1

    enc._graphs = Graphs()  # type: ignore[assignment]
    plan = enc.plan(PICTURES)
    assert plan.peak_bytes == plain.plan(PICTURES).peak_bytes + 1000
    for ours, theirs in zip(enc.encode(PICTURES), plain.encode(PICTURES), strict=True):
        assert torch.equal(ours.tensor, theirs.tensor)
    assert packs == [batch.patches for batch in plan.batches]
    enc.clear_caches()
    assert Graphs.cleared == 1
    enc.close()
    assert Graphs.cleared == 2 and enc._graphs is None
