"""The memory benchmark: its counts are exact, its rivals are equal to ours, and its bars hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moonvit.bench import memory, report, rivals
from moonvit.bench.measure import Ledger, ProductsLeftOut, outputs_ready, peak, resident
from moonvit.bench.memory import EXTENTS, LARGEST, OURS, PLAN, Extent, Row
from moonvit.errors import ConfigError, DivergenceError
from moonvit.families import family_config
from moonvit.grids import Grid
from moonvit.model import VisionModel
from moonvit.preprocess import resize_plan
from moonvit.reference import full_rotary_table

ROOT = Path(__file__).parents[2]
QUICK = EXTENTS["quick"]
MIB = 1 << 20
FEATURES = 57_286_656
"""Bytes of three features of 1,332 rows, bfloat16, width 7168."""


def values(rows: list[Row]) -> dict[tuple[str, str, str], float]:
    return {(row.case, row.who, row.metric): row.value for row in rows}


# ---- counting -------------------------------------------------------------------------------------------------------


def test_peak_counts_what_lives_at_once() -> None:
    def work() -> torch.Tensor:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(1 << 19, dtype=torch.uint8)
        del first
        third = torch.empty(1 << 18, dtype=torch.uint8)
        del second
        return third

    assert peak(work) == (3 << 19, 1 << 18)
    assert peak(lambda: None) == (0, 0)


@torch.no_grad()
def test_three_ways_to_count_agree() -> None:
    """The allocator, the allocator without products, and fake tensors; where kernels take nothing for themselves."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = family_config("demo", num_layers=2)
    grids = [Grid(1, 18, 16), Grid(1, 10, 10)]
    model = VisionModel.empty(config)
    patches = torch.zeros(388, 588, dtype=torch.uint8)

    def work() -> Any:
        return rivals.project(
            model.projector, model.vision_tower.patch_embed(patches, model.prepare(grids)).view(97, -1)
        )

    counted = peak(work).peak
    with ProductsLeftOut():
        assert peak(work).peak == counted
    with FakeTensorMode():
        model, patches = VisionModel(config), torch.empty(388, 588, dtype=torch.uint8)
        with Ledger() as ledger:
            work()
        assert ledger.peak == pytest.approx(counted, rel=0.001)
    assert ledger.live == 0


def test_products_left_out_keep_shapes() -> None:
    config = family_config("kimi-k3", num_layers=1, hidden_size=64, num_heads=2, qkv_size=96, text_hidden_size=32)
    model = VisionModel.empty(config).init_weights_(0)
    grids = [Grid(1, 6, 4), Grid(1, 2, 8)]
    patches = torch.randint(0, 256, (40, 588), dtype=torch.uint8)
    whole = model(patches, model.prepare(grids))
    with ProductsLeftOut():
        empty = model(patches, model.prepare(grids))
    assert [features.shape for features in whole] == [features.shape for features in empty]
    assert all(features.count_nonzero() == 0 for features in empty)


def test_outputs_ready_takes_features_out_of_the_count() -> None:
    model = VisionModel.empty(family_config("demo", num_layers=1)).init_weights_(0)
    merged = torch.randn(500, 768)
    alone = peak(lambda: model.project(merged))
    with outputs_ready(model, [500]):
        ready = peak(lambda: model.project(merged))
    assert (alone.peak - ready.peak, alone.kept, ready.kept) == (500 * 192 * 4, 500 * 192 * 4, 0)
    assert "_new_features" not in vars(model)


def test_a_process_has_a_size() -> None:
    assert sys.platform != "linux" or (resident() or 0) > 50 * MIB


# ---- rivals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [72, 128])
def test_the_rival_table_is_the_official_one(head_dim: int) -> None:
    expected = full_rotary_table(head_dim, side=40)
    assert torch.equal(torch.view_as_real(rivals.grid_factors(40, 40, head_dim)), torch.view_as_real(expected))


@pytest.mark.parametrize("family", list(LARGEST))
def test_a_tower_that_takes_a_request_at_once_gives_our_features(family: str) -> None:
    narrow: dict[str, Any] = {"num_layers": 2, "hidden_size": 96, "num_heads": 2, "intermediate_size": 100}
    width = {"qkv_size": 144 if family == "kimi-k3" else 96, "text_hidden_size": 64}
    memory.prove_whole_request(family, family_config(family, **narrow, **width))


def test_what_differs_is_not_measured() -> None:
    memory.prove_close("case", [torch.ones(3)], [torch.ones(3)])
    with pytest.raises(DivergenceError, match=r"case: outputs differ by .*e-03, allowed are 1.0e-05"):
        memory.prove_close("case", [torch.full((3,), 1.001)], [torch.ones(3)])
    with pytest.raises(DivergenceError, match="so nothing was measured"):
        memory.prove("case", False)


@pytest.mark.parametrize(("family", "patches"), [("kimi-vl", 5352), ("kimi-k2.5", 17_856), ("kimi-k3", 67_268)])
def test_the_largest_images_are_the_known_ones(family: str, patches: int) -> None:
    assert resize_plan(family_config(family).rule, *LARGEST[family]).grid.patches == patches


# ---- bars -----------------------------------------------------------------------------------------------------------


def check_rotary(found: dict[tuple[str, str, str], float]) -> None:
    one, five, whole = (f"a: rotary, {name}" for name in ("one 36x36", "five 36x36", "one 512x512"))
    assert found[one, OURS, "peak"] <= 40_960
    assert found[one, "full grid", "peak"] > 330_000_000
    assert found[one, "request-sized", "peak"] > 1_600_000
    assert found[five, "request-sized", "kept"] == 5 * found[one, "request-sized", "kept"] == 5 * 663_552
    assert found[five, OURS, "kept"] == found[one, OURS, "kept"] <= found[one, "request-sized", "kept"]
    assert found[one, "full grid", "kept after the request"] == 134_217_728
    assert found[whole, OURS, "peak"] <= MIB
    assert found[whole, OURS, "kept after the request"] == 0


def check_projector(found: dict[tuple[str, str, str], float]) -> None:
    [case] = {case for case, _, metric in found if case.startswith("b: ") and metric == "features"}
    assert found[case, OURS, "features"] == FEATURES
    assert found[case, OURS, "peak"] <= 1.07 * FEATURES
    ranks = [found[case, f"{form}, 1 of 16 ranks", "peak"] for form in ("concatenated", "per image")]
    # what is published has 12,320,768 bytes more in both, of weights and of a library's workspace
    assert ranks == [104_388_608 - 12_320_768, 70_289_408 - 12_320_768]
    assert found[case, "concatenated", "peak"] > found[case, "per image", "peak"] > found[case, OURS, "peak"]


def check_towers(found: dict[tuple[str, str, str], float]) -> None:
    def get(images: str, who: str, metric: str) -> float:
        return next(
            value
            for (case, by, what), value in found.items()
            if case.startswith(f"c: K2.5, {images} of 36x36, bfloat16") and (by, what) == (who, metric)
        )

    one, five = get("1 image", OURS, "workspace"), get("5 images", OURS, "workspace")
    features = get("1 image", OURS, "features")
    assert one + features <= 20 * MIB
    assert five + get("5 images", OURS, "features") <= 1.02 * (one + 5 * features)
    assert get("1 image", "transformers", "peak") / MIB == pytest.approx(49.1, abs=0.1)
    assert get("5 images", "transformers", "peak") / MIB == pytest.approx(245.7, abs=0.1)


def check_plans(found: dict[tuple[str, str, str], float]) -> int:
    cases = [case for case, who, metric in found if (who, metric) == (PLAN, "workspace")]
    for case in cases:
        planned, measured = found[case, PLAN, "workspace"], found[case, OURS, "workspace"]
        # what oneDNN takes in half precision, on machines where it is used, is an envelope and not a sum
        assert measured <= planned <= 1.01 * measured, case
    return len(cases)


def check_largest(found: dict[tuple[str, str, str], float]) -> None:
    case = "d: kimi-k3, 67,268 patches, bfloat16, 1 layer, fake tensors"
    assert found[case, OURS, "workspace"] <= 620_000_000
    assert found[f"{case}, budget 0.40GB", OURS, "workspace"] <= 400_000_000
    assert found[case, "whole request", "peak"] >= 1_300_000_000


def test_rotary_bars() -> None:
    check_rotary(values(list(memory.rotary(QUICK))))


@pytest.mark.filterwarnings("ignore")
def test_projector_bars() -> None:
    if not memory._slow("bfloat16", "cpu"):
        pytest.skip("products are run whole here, which is a benchmark and not a test")
    check_projector(values(list(memory.projector(QUICK))))


def test_many_requests_keep_nothing() -> None:
    rows = list(memory.requests(Extent(requests=40, early=15)))
    found = values(rows)
    case = "e: 40 requests"
    assert found[case, OURS, "live tensors after 15"] == found[case, OURS, "live tensors after 40"] > 0
    assert {row.unit for row in rows} == {"bytes", "%"}
    assert {row.metric for row in rows if row.unit == "%"} >= {"live tensors, growth"}


def test_cases_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="case 'f' is unknown; known are a, b, c, d, e"):
        memory.run(["f"])


# ---- the document and the page --------------------------------------------------------------------------------------

ROWS = [
    Row("x: one", OURS, "peak", 50),
    Row("x: one", "other", "peak", 200),
    Row("x: one", "other", "kept", 7),
    Row("x: two", OURS, "growth", 0.125, "%"),
]


def test_the_document_has_the_shape_of_all() -> None:
    found = json.loads(json.dumps(report.document("memory", ROWS)))
    assert list(found) == ["bench", "machine", "rows", "ratios"]
    assert found["rows"][0] == {"case": "x: one", "who": OURS, "metric": "peak", "value": 50, "unit": "bytes"}
    assert found["ratios"] == {"x: one: peak, against other": 0.25}
    assert {"cpu", "threads", "packages", "commit"} <= set(found["machine"])
    assert found["machine"]["packages"]["torch"] == torch.__version__


def test_cells_name_a_case_once() -> None:
    assert report.cells(ROWS)[1] == ["", "other", "peak", "200", "bytes"]
    assert report.cells(ROWS)[3] == ["x: two", OURS, "growth", "0.125", "%"]


@pytest.mark.filterwarnings("ignore")
def test_pages_are_written_whole(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "memory.md").write_text(f"above\n{report.BEGIN}\nold\n{report.END}\nbelow\n")
    found = report.document("memory", ROWS)
    for _ in range(2):
        report.write_docs(found, tmp_path)
    text = (tmp_path / "memory.md").read_text()
    assert text == f"above\n{report.BEGIN}\n{report.markdown(found)}\n{report.END}\nbelow\n"
    assert json.loads((tmp_path / "memory.json").read_text()) == found
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_what_was_measured_and_the_bars_hold() -> None:
    found = json.loads((ROOT / "docs/memory.json").read_text())
    page = (ROOT / "docs/memory.md").read_text()
    assert f"{report.BEGIN}\n{report.markdown(found)}\n{report.END}" in page
    measured = values([Row(**row) for row in found["rows"]])
    check_rotary(measured)
    check_projector(measured)
    check_towers(measured)
    check_largest(measured)
    assert check_plans(measured) >= 10
    growth = {metric: value for (_, _, metric), value in measured.items() if metric.endswith("growth")}
    assert len(growth) == 2 and all(value <= 1 for value in growth.values())


@pytest.mark.parametrize("words", [["--help"], ["memory", "--help"]])
def test_the_command_explains_itself_without_torch(words: list[str]) -> None:
    code = (
        "import sys\nfrom moonvit.cli import app\n"
        f"app({['bench', *words]}, standalone_mode=False)\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "Usage" in done.stdout


def test_the_command_prints_one_document() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moonvit", "bench", "memory", "--quick", "--cases", "e", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["bench"] == "memory" and found["rows"][0]["case"] == "e: 200 requests"
    assert "e: 200 requests" in done.stderr
