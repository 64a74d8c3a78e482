"""Many ranks on paper: bytes are those that arrive, assignments near the bound, and the page says what is counted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moonvit.bench import scale
from moonvit.bench.report import OURS, Row
from moonvit.bench.scale import BOUND, FIVE, KV_BYTES, LONGEST, PEERS, arrivals, out_of_reach, ring_gather, ring_sum
from moonvit.cli import app
from moonvit.deploy import deploy, even_shares, least_load, padded_bytes, received_bytes, reduced_bytes
from moonvit.errors import DivergenceError, InvalidInputError
from moonvit.families import family_config
from moonvit.preprocess import resize_plan

ROOT = Path(__file__).parents[2]
K3 = family_config("kimi-k3")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return scale.run("usual")


def values(rows: list[Row], case: str) -> dict[tuple[str, str], float]:
    return {(row.who, row.metric): row.value for row in rows if row.case.startswith(case)}


def test_the_page_shows_what_is_counted(rows: list[Row], tmp_path: Path) -> None:
    page = (ROOT / "docs/scale.md").read_text()
    shown = scale.tables(rows)
    for name, table in shown.items():
        assert f"<!-- {name}:begin -->\n{table}\n<!-- {name}:end -->" in page, name
    assert page.count(":begin -->") == len(shown)
    outside = [line for line in page.splitlines() if line.startswith("|")]
    assert len(outside) == sum(len(table.splitlines()) for table in shown.values()), "no table is typed by hand"
    copy = tmp_path / "scale.md"
    copy.write_text(page)
    scale.write_page(rows, copy)
    assert copy.read_text() == page


def test_the_busiest_rank_is_near_the_bound_where_it_can_be(rows: list[Row]) -> None:
    missed = 0
    for family in ("kimi-vl", "kimi-k2.5", "kimi-k3"):
        found = values(rows, f"{family}: 1,000 random requests on 8 ranks")
        near, out, could, unknown = (
            found[OURS, name] for name in ("requests within 1.05", "proven out of reach", "missed", "open")
        )
        assert near + out + could + unknown == 1000
        assert near >= found[LONGEST, "requests within 1.05"] >= found[PEERS, "requests within 1.05"]
        assert near >= 960 and could <= 1 and unknown <= 1
        missed += could + unknown
    assert missed <= 3
    assert values(rows, "kimi-k3: 1,000")[OURS, "requests within 1.05"] == 1000


def test_bytes_are_those_that_arrive() -> None:
    rng = random.Random(1)
    for _ in range(200):
        ranks, images = rng.randint(1, 20), rng.randint(1, 30)
        outputs = [rng.randint(1, 10**9) for _ in range(images)]
        shares = even_shares([rng.randint(0, 99) for _ in outputs], ranks)
        assert list(received_bytes(outputs, shares)) == arrivals(outputs, shares)
        assert ring_gather(outputs, shares) == [padded_bytes(outputs, shares)] * ranks
        assert sum(received_bytes(outputs, shares)) == (ranks - 1) * sum(outputs)
    for ranks in (1, 2, 4):
        assert reduced_bytes(K3, 64, ranks) == 2 * 27 * ring_sum(64 * 1024 * 2, ranks)


def test_the_largest_picture_padded_is_sixteen(rows: list[Row]) -> None:
    found = values(rows, "the largest picture of K3")
    assert found[PEERS, "gathered over features"] == 16
    assert found[PEERS, "held by every rank, gathered"] == 16 * found[OURS, "features"]
    assert found[OURS, "received by an idle rank"] == found[OURS, "features"] == 16_817 * 7168 * 2
    assert found[OURS, "received by the busiest rank"] == 0


def test_the_kv_cache_of_the_published_run(rows: list[Row]) -> None:
    found = values(rows, "the KV cache of K3")
    assert (KV_BYTES, found[OURS, "a token on one rank"]) == (13_824, 864)
    assert found[OURS, "the cache on one rank"] == 1_016_293 * 864 == 878_077_152
    assert found[OURS, "the prompt on one rank"] == 134_209 * 864
    grids = [resize_plan(K3.rule, *size).grid for size in FIVE]
    made = deploy(K3, grids, dp=16)
    assert values(rows, "five pictures")[OURS, "received by all ranks"] == made.received_bytes


def test_a_search_says_what_cannot_be() -> None:
    assert out_of_reach([5, 5, 4, 4, 3, 3, 3], 3, 9) is False
    assert out_of_reach([5, 5, 5, 5], 3, 9) is True
    assert out_of_reach([50, 51, 52, 53, 30], 3, 105) is False
    assert out_of_reach([50, 51, 52, 53, 7, 54], 3, 106) is False, "the 7 lies beside the single one"
    assert out_of_reach([50, 51, 52, 53, 54, 57], 3, 106) is True, "with 57 goes none"
    assert out_of_reach([], 3, 0) is False


def test_what_a_search_says_is_true_of_all_assignments() -> None:
    from tests.unit.test_deploy import best

    rng = random.Random(2)
    said = set()
    for _ in range(150):
        ranks, items = rng.randint(1, 4), rng.randint(1, 6)
        costs = [rng.choice((rng.randint(20, 22), rng.randint(1, 30))) for _ in range(items)]
        capacity = least_load(costs, ranks) * 105 // 100
        said.add(out := out_of_reach(costs, ranks, capacity))
        assert out == (best(costs, ranks) > capacity)
    assert said == {True, False}


def test_a_search_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "NODES", 3)
    assert out_of_reach([7, 6, 5, 4, 3, 2, 1], 2, 14) is None


def test_groups_keep_a_request_to_sixteen_ranks(rows: list[Row]) -> None:
    day = "a day of 2,000 requests to kimi-k3: "
    sixteen, eight, many = (values(rows, day + f"{name} of 16") for name in ("one group", "8 groups", "64 groups"))
    moved, summed = "received by all ranks", "busiest rank, summed"
    assert sixteen[OURS, moved] == eight[OURS, moved] == many[OURS, moved]
    features = values(rows, day.removesuffix(": "))[OURS, "features"]
    assert sixteen[OURS, moved] == 15 * features
    for size in (128, 1024):
        one = values(rows, day + f"one group of {size:,}")
        assert one[OURS, moved] == (size - 1) * features
        assert one[PEERS, moved] > size / 10 * one[OURS, moved]
        assert one[BOUND, summed] <= one[OURS, summed] <= sixteen[OURS, summed]
    for of in (sixteen, eight, many):
        assert of[BOUND, summed] <= of[OURS, summed] <= of[PEERS, summed]
        assert of[OURS, summed] <= 1.05 * of[BOUND, summed]


def test_a_day_is_the_same_every_time() -> None:
    assert scale.day(K3, 50) == scale.day(K3, 50) != scale.day(K3, 50, seed=6)
    assert max(grid.patches for request in scale.day(K3, 400) for grid in request) == 67_268


@pytest.mark.parametrize("spoil", [lambda counts: counts[1:], lambda counts: [count + 1 for count in counts]])
def test_bytes_that_differ_from_the_formula_stop_the_count(
    spoil: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "arrivals", lambda *both: spoil(arrivals(*both)))
    with pytest.raises(DivergenceError):
        scale.a_day(K3, 3)
    with pytest.raises(DivergenceError):
        scale.paper()


def test_the_command_prints_one_document() -> None:
    done = CliRunner().invoke(app, ["bench", "scale", "--quick", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert found["bench"] == "scale" and set(found) == {"bench", "machine", "rows", "ratios"}
    padded = "the largest picture of K3 on 16 ranks: received by all ranks, against by patches, padded"
    assert found["ratios"][padded] == 1 / 16
    assert "100 random requests" in CliRunner().invoke(app, ["bench", "scale", "--quick"]).stdout


def test_a_page_without_places_is_refused(tmp_path: Path) -> None:
    for words in (["--docs", str(tmp_path)], ["--quick", "--docs", str(ROOT / "docs")]):
        assert isinstance(CliRunner().invoke(app, ["bench", "scale", *words]).exception, InvalidInputError)
    page = tmp_path / "scale.md"
    page.write_text("nothing")
    with pytest.raises(InvalidInputError, match="no place for a table between <!-- assignment:begin -->"):
        scale.write_page(scale.run("quick"), page)
