"""Stock towers: the formulas against every figure that was published or worked out by hand."""

from __future__ import annotations

import pytest

from moonvit.deploy import deploy
from moonvit.errors import ConfigError, EmptyInputError
from moonvit.families import FAMILIES, family_config
from moonvit.grids import Grid
from moonvit.plan import Machine
from moonvit.stock import (
    ENGINES,
    attention_bytes,
    mlp_bytes,
    projector_bytes,
    rope_construction,
    rope_requested,
    rope_table,
    stock,
)

K25, K3 = family_config("kimi-k2.5"), family_config("kimi-k3")
LARGEST = Grid(1, 134, 502)
"""67,268 patches: the largest picture K3 takes, 1861 x 7041."""


def test_published_rotary_figures() -> None:
    assert rope_construction(128, 36 * 36) == 340_018_176
    assert rope_requested(128, 36 * 36) == 1_990_656
    assert (rope_table(72), rope_table(128)) == (75_497_472, 134_217_728)


def test_published_projector_figures() -> None:
    at_once, one_by_one = (projector_bytes(K3, [1332] * 3, 2, 16, whole) for whole in (True, False))
    assert at_once - one_by_one == 104_388_608 - 70_289_408 == 34_099_200
    # What was measured holds besides the tensors the same bytes both times.
    assert 104_388_608 - at_once == 70_289_408 - one_by_one == 12_320_768


def test_the_largest_image_of_k3() -> None:
    assert LARGEST.patches == 67_268
    assert f"{mlp_bytes(K3, LARGEST.patches, 2) / 1e9:.2f}" == "1.38"
    assert f"{attention_bytes(K3, LARGEST.patches, 2) / 1e9:.2f}" == "1.24"
    assert f"{mlp_bytes(K25, 16_900, 2) / 1e9:.2f}" == "0.37"
    # One image over 16 data-parallel ranks: 16 times its merged rows on each, 15 parts of them padding.
    [first, *_, last] = stock("vllm", K3, [LARGEST], dp=16).ranks
    rows = LARGEST.tokens * 4096 * 2
    assert f"{16 * rows / 1e9:.1f}" == "2.2"
    pixels = LARGEST.patches * 588
    assert last.images == () and last.moments["gathering"] == 17 * rows + pixels
    assert first.moments["gathering"] == 18 * rows + 2 * pixels + rope_table(128)


def test_one_rank_of_vllm_by_hand() -> None:
    grids = [Grid(1, 36, 36), Grid(1, 8, 8)]
    made = stock("vllm", K3, grids)
    assert (made.engine, made.mode, len(made.ranks)) == ("vLLM 0.32", "one rank", 1)
    p, n = 1296 + 64, 324 + 16
    pixels, table, factors = p * 588, 134_217_728, p * 128 * 4
    assert made.heaviest.moments == {
        "rotary table": pixels + p * 1024 * 2 + rope_construction(128, p),
        "embedding": pixels + table + 3 * p * 1024 * 2,
        "attention": pixels + table + factors + 2 * p * (3 * 1024 + 4 * 1536),
        "MLP": pixels + table + factors + 2 * p * (2 * 1024 + 2 * 4096),
        "merging": pixels + table + p * 1024 * 2 + n * 4096 * 2 + 1296 * 1024 * 2,
        "projecting": pixels + table + n * (4096 + 4096 + 4096 + 7168) * 2,
    }
    assert made.heaviest.moment == "rotary table"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_spread(engine: str, family: str) -> None:
    config = family_config(family)
    grids = [Grid(1, 60, 80), Grid(1, 40, 40), Grid(1, 20, 30)]
    alone = stock(engine, config, grids)
    for tp, dp in ((4, 1), (1, 4), (2, 2)):
        made = stock(engine, config, grids, tp=tp, dp=dp)
        ours = deploy(config, grids, tp=tp, dp=dp, machine=Machine("cuda"))
        assert len(made.ranks) == len(ours.rank_peaks) == 4
        assert made.heaviest.peak_bytes > ours.heaviest.peak_bytes
        divided = dp == 1 and (engine, family) != ("sglang", "kimi-k3")
        assert made.mode == ("tensor parallel over 4" if divided else "data parallel over 4")
        encoded = sorted(index for rank in made.ranks for index in rank.images)
        assert encoded == sorted([0, 1, 2] * (4 if divided else 1))
        if divided:
            assert all(rank.moments["attention"] < alone.heaviest.moments["attention"] for rank in made.ranks)
    assert stock(engine, config, grids, dtype="float32").heaviest.peak_bytes > alone.heaviest.peak_bytes


def test_memory_grows_with_the_images_where_ours_does_not() -> None:
    one, five = [Grid(1, 64, 64)], [Grid(1, 64, 64)] * 5
    for engine in ENGINES:
        grown = [stock(engine, K25, grids).heaviest.moments["MLP"] - rope_table(72) for grids in (one, five)]
        assert grown[1] == 5 * grown[0]


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="engine = 'tgi': known are vllm, sglang"):
        stock("tgi", K3, [(2, 2)])
    with pytest.raises(ConfigError, match="dtype = 'int8'"):
        stock("vllm", K3, [(2, 2)], dtype="int8")
    with pytest.raises(EmptyInputError):
        stock("vllm", K3, [])
