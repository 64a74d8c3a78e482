"""``moonvit bench scale``: requests over many ranks, on paper: who encodes what, and which bytes move.

Three parts. ``assignment``: random requests on eight ranks, the busiest rank held against the bound; where the bound is
missed, a search says whether anything could reach it. ``paper``: five pictures, and the largest one, of K3 on sixteen
ranks. ``day``: mixed requests over 16, 128 and 1,024 ranks, in groups and as one group. Bytes come from the formulas of
``deploy`` and are proven equal to a count of messages as they arrive, before anything is said.

Peers assign by patches alone and gather rows padded to the fullest rank (vLLM 0.32, SGLang 0.5.23). Both are judged by
operations, and by features of the language width, so that only the way of moving differs; peers gather rows before they
are projected, which ``paper`` shows besides.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from moonvit.bench.memory import LARGEST, prove
from moonvit.bench.report import OURS, Row, cells
from moonvit.deploy import (
    deploy,
    even_shares,
    least_load,
    longest_first,
    padded_bytes,
    received_bytes,
    reduced_bytes,
)
from moonvit.errors import InvalidInputError
from moonvit.families import FAMILIES, VisionConfig, family_config
from moonvit.grids import Grid
from moonvit.plan import ELEMENT_BYTES, Machine, image_flops
from moonvit.preprocess import resize_plan
from moonvit.stock import ENGINES, stock

LONGEST = "longest first"
PEERS = "by patches, padded"
BOUND = "least possible"
COMPARED = ("busiest rank, summed", "received by all ranks", "requests within 1.05")
"""Metrics whose ratios mean something."""
RANKS = (16, 128, 1024)
GROUP = 16
"""Ranks of one engine: what shares a KV cache."""
FIVE = ((4000, 3000), (1920, 1080), (640, 480), (2000, 1500), (1024, 768))
PROMPT = 134_209
"""Tokens of the published run of K3 with five pictures on sixteen ranks."""
KV_TOKENS = 1_016_293
"""Tokens that its KV cache holds."""
KV_BYTES = 24 * (512 + 64)
"""Bytes of a token of K3 in FP8: 24 latent layers of 512 + 64 values."""
NODES = 20_000
"""Steps after which a search gives up."""

Shares = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Extent:
    """How much is counted.

    Attributes:
        random: Random requests of each family.
        day: Requests of a day.
    """

    random: int = 1000
    day: int = 2000


EXTENTS = {"quick": Extent(random=100, day=200), "usual": Extent()}


# ---- proofs ---------------------------------------------------------------------------------------------------------


def arrivals(outputs: Sequence[int], shares: Shares) -> list[int]:
    """Bytes that arrive at each rank while owners send every image to every other rank, message by message.

    Args:
        outputs: Bytes of the features of each image.
        shares: Images of each rank.

    Returns:
        Bytes for each rank.
    """
    arrived = torch.zeros(len(shares), dtype=torch.int64)
    for owner, images in enumerate(shares):
        for image in images:
            for others in (arrived[:owner], arrived[owner + 1 :]):
                others += outputs[image]
    return arrived.tolist()


def ring_gather(outputs: Sequence[int], shares: Shares) -> list[int]:
    """Bytes that each rank holds after an all-gather around a ring, slot by slot.

    Args:
        outputs: Bytes of the features of each image.
        shares: Images of each rank.

    Returns:
        Bytes for each rank.
    """
    ranks = len(shares)
    slot = max(sum(outputs[image] for image in images) for images in shares)
    held = [{rank} for rank in range(ranks)]
    for step in range(ranks - 1):
        for rank in range(ranks):  # what the neighbour before it got a step ago
            held[rank].add((rank - 1 - step) % ranks)
    prove("gathering", all(len(slots) == ranks for slots in held))
    return [len(slots) * slot for slots in held]


def ring_sum(count: int, ranks: int) -> int:
    """Bytes that each rank receives while a ring sums what all have: parts are summed on their way, then passed on.

    Args:
        count: Bytes of what is summed.
        ranks: Of the ring.

    Returns:
        Bytes; the same for every rank.
    """
    part = -(-count // ranks)
    summed = [[1] * ranks for _ in range(ranks)]  # how many ranks' values are in each part, on each rank
    received = [0] * ranks
    for step in range(2 * (ranks - 1)):
        sent = [summed[rank][(rank - step) % ranks] for rank in range(ranks)]
        for rank in range(ranks):
            before = (rank - 1) % ranks
            place = (before - step) % ranks
            summed[rank][place] = sent[before] + (summed[rank][place] if step < ranks - 1 else 0)
            received[rank] += part
    prove("summing", all(parts == [ranks] * ranks for parts in summed))
    return max(received, default=0)


def out_of_reach(costs: Sequence[int], ranks: int, capacity: int) -> bool | None:
    """Whether no assignment of whole items keeps every rank within a capacity, by exhaustive search.

    Items of almost one cost are first taken as equal to the least of them, which makes the search short: where even
    those cannot be placed, the items cannot.

    Args:
        costs: Cost of each item.
        ranks: Their number.
        capacity: What a rank may get.

    Returns:
        True where it is proven, False where an assignment was found, None where the search gave up.
    """
    for thousandths in (50, 30, 20, 10, 5, 0):
        lowered: list[int] = []
        for cost in sorted(costs):
            lowered.append(lowered[-1] if lowered and cost * 1000 <= lowered[-1] * (1000 + thousandths) else cost)
        placed = _placed(lowered[::-1], ranks, capacity)
        if placed is False:
            return True
        if placed and not thousandths:
            return False
    return None


def _placed(falling: Sequence[int], ranks: int, capacity: int) -> bool | None:
    rest = [sum(falling[place:]) for place in range(len(falling) + 1)]
    dead: set[tuple[int, tuple[int, ...]]] = set()
    steps = 0

    def place(item: int, rooms: tuple[int, ...]) -> bool:
        nonlocal steps
        if item == len(falling):
            return True
        steps += 1
        usable = sum(room for room in rooms if room >= falling[-1])
        if steps > NODES or usable < rest[item] or (item, rooms) in dead:
            return False
        for room in sorted(set(rooms)):
            if room >= falling[item]:
                left = list(rooms)
                left[left.index(room)] = room - falling[item]
                if place(item + 1, tuple(sorted(left))):
                    return True
        dead.add((item, rooms))
        return False

    found = place(0, (capacity,) * ranks)
    return None if not found and steps > NODES else found


# ---- requests -------------------------------------------------------------------------------------------------------


@cache
def _grid(family: str, width: int, height: int) -> Grid:
    return resize_plan(family_config(family).rule, width, height).grid


def random_request(config: VisionConfig, rng: random.Random) -> list[Grid]:
    """A request of 1 to 64 pictures with sides of 28 to 4,000 pixels.

    Args:
        config: The model, whose resize rule makes the grids.
        rng: What decides.

    Returns:
        Its grids.
    """
    sides = [(rng.randint(28, 4000), rng.randint(28, 4000)) for _ in range(rng.randint(1, 64))]
    return [_grid(config.family, *side) for side in sides]


def day(config: VisionConfig, count: int, seed: int = 5) -> list[list[Grid]]:
    """Mixed requests: photographs, cropped, in half of them; pages, with figures cut out of some, in a quarter.

    Most others are screenshots; one in a hundred is the largest picture there is.

    Args:
        config: The model, whose resize rule makes the grids.
        count: Requests.
        seed: The same seed gives the same day.

    Returns:
        Grids of each request.
    """
    rng = random.Random(seed)
    requests = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.50:
            sizes = [_cut((4032, 3024), rng) for _ in range(rng.randint(1, 4))]
        elif kind < 0.75:
            page = rng.choice(((1240, 1754), (1654, 2339), (2480, 3508)))
            sizes = [page if rng.random() < 0.6 else _cut(page, rng) for _ in range(rng.randint(1, 64))]
        elif kind < 0.99:
            sizes = [rng.choice(((1920, 1080), (2560, 1440), (1170, 2532))) for _ in range(rng.randint(1, 6))]
        else:
            sizes = [LARGEST[config.family]]
        requests.append([_grid(config.family, *size) for size in sizes])
    return requests


def _cut(size: tuple[int, int], rng: random.Random) -> tuple[int, int]:
    """A part of a picture, at least a quarter of each side, in sixteenths."""
    return size[0] * rng.randint(4, 16) // 16, size[1] * rng.randint(4, 16) // 16


def _output(config: VisionConfig, grid: Grid) -> int:
    return grid.tokens * config.text_hidden_size * ELEMENT_BYTES["bfloat16"]


def _most(costs: Sequence[int], shares: Shares) -> int:
    return max(sum(costs[index] for index in indices) for indices in shares if indices)


# ---- what is counted ------------------------------------------------------------------------------------------------


def assignment(config: VisionConfig, count: int, ranks: int = 8, seed: int = 8) -> list[Row]:
    """Random requests: how near the bound the busiest rank is, and whether it could be nearer.

    Args:
        config: The model.
        count: Requests.
        ranks: Data-parallel ranks.
        seed: Of the requests.

    Returns:
        Rows for ours, for ``longest_first`` by operations, and for peers.
    """
    rng = random.Random(seed)
    within, worst = dict.fromkeys((OURS, LONGEST, PEERS), 0), dict.fromkeys((OURS, LONGEST, PEERS), 0.0)
    settled: dict[bool | None, int] = {True: 0, False: 0, None: 0}
    for _ in range(count):
        grids = random_request(config, rng)
        costs = [image_flops(config, grid) for grid in grids]
        least = least_load(costs, ranks)
        for who, shares in (
            (OURS, even_shares(costs, ranks)),
            (LONGEST, longest_first(costs, ranks)),
            (PEERS, longest_first([grid.patches for grid in grids], ranks)),
        ):
            most = _most(costs, shares)
            worst[who] = max(worst[who], most / least)
            if most * 100 <= least * 105:
                within[who] += 1
            elif who == OURS:
                settled[out_of_reach(costs, ranks, least * 105 // 100)] += 1
    case = f"{config.family}: {count:,} random requests on {ranks} ranks"
    rows = [Row(case, who, "requests within 1.05", number, "requests") for who, number in within.items()]
    names = {True: "proven out of reach", False: "missed", None: "open"}
    rows += [Row(case, OURS, name, settled[key], "requests") for key, name in names.items()]
    return rows + [Row(case, who, "worst over the bound", round(ratio, 6), "x") for who, ratio in worst.items()]


def paper() -> list[Row]:
    """K3 on sixteen ranks: five pictures, and the largest.

    Returns:
        Rows of both, with the KV cache beside them.
    """
    config = family_config("kimi-k3")
    rows = []
    for case, sizes in (("five pictures of K3", FIVE), ("the largest picture of K3", (LARGEST["kimi-k3"],))):
        case = f"{case} on {GROUP} ranks"
        grids = [_grid(config.family, *size) for size in sizes]
        made = deploy(config, grids, dp=GROUP, machine=Machine("cuda"))
        shares = [share.images for share in made.shares]
        outputs = [_output(config, grid) for grid in grids]
        received = [share.received_bytes for share in made.shares]
        prove(case, received == arrivals(outputs, shares), "bytes received")
        prove(case, [made.padded_bytes] * GROUP == ring_gather(outputs, shares), "padded bytes")
        tokens = sum(grid.tokens for grid in grids)
        rows += [
            Row(case, OURS, "patches", sum(grid.patches for grid in grids), "patches"),
            Row(case, OURS, "patches of the fullest rank", _most([grid.patches for grid in grids], shares), "patches"),
            Row(case, OURS, "image tokens", tokens, "tokens"),
            Row(case, OURS, "features", sum(outputs)),
            Row(case, OURS, "received by the busiest rank", received[0]),
            Row(case, OURS, "received by an idle rank", max(received)),
            Row(case, OURS, "received by all ranks", made.received_bytes),
            Row(case, PEERS, "received by all ranks", GROUP * (made.padded_bytes - made.padded_bytes // GROUP)),
            Row(case, PEERS, "held by every rank, gathered", made.padded_bytes),
            Row(
                case,
                PEERS,
                "the same before projecting",
                made.padded_bytes * config.merged_size // config.text_hidden_size,
            ),
            Row(case, PEERS, "gathered over features", round(made.padded_bytes / sum(outputs), 6), "x"),
            Row(case, OURS, "busiest over the bound", round(made.imbalance, 6), "x"),
            Row(case, OURS, "busiest over the mean", round(made.over_mean, 6), "x"),
            Row(case, OURS, "peak of the fullest rank", made.heaviest.peak_bytes),
        ]
        for engine, name in ENGINES.items():
            peak = stock(engine, config, grids, dp=GROUP).heaviest.peak_bytes
            freed = (peak - made.heaviest.peak_bytes) // (KV_BYTES // GROUP)
            rows += [
                Row(case, f"{name}, computed", "peak of the fullest rank", peak),
                Row(case, f"{name}, computed", "KV tokens ours leaves more room for", freed, "tokens"),
            ]
        patches = sum(grid.patches for grid in grids)
        summed = reduced_bytes(config, patches, 4)
        whole = patches * config.hidden_size * ELEMENT_BYTES["bfloat16"]
        prove(case, summed == 2 * config.num_layers * ring_sum(whole, 4), "bytes summed")
        rows.append(Row(case, "tensor parallel over 4", "received by each rank", summed))
    each = KV_BYTES // GROUP
    case = f"the KV cache of K3 in FP8 on {GROUP} ranks"
    return [
        *rows,
        Row(case, OURS, "a token on all ranks", KV_BYTES),
        Row(case, OURS, "a token on one rank", each),
        Row(case, OURS, "tokens of the cache", KV_TOKENS, "tokens"),
        Row(case, OURS, "the cache on one rank", KV_TOKENS * each),
        Row(case, OURS, "tokens of the prompt", PROMPT, "tokens"),
        Row(case, OURS, "the prompt on one rank", PROMPT * each),
        Row(case, OURS, "prompts of that length", KV_TOKENS // PROMPT, "prompts"),
    ]


@dataclass
class _Tally:
    """What a day adds up to in one layout.

    Attributes:
        busiest: Operations of the busiest rank, summed over requests, by who assigns.
        received: Bytes that all ranks received, by who moves them.
        busy: Ranks that had a picture, summed over requests.
    """

    busiest: dict[str, int] = field(default_factory=lambda: dict.fromkeys((OURS, PEERS, BOUND), 0))
    received: dict[str, int] = field(default_factory=lambda: dict.fromkeys((OURS, PEERS), 0))
    busy: int = 0

    def add(self, case: str, grids: Sequence[Grid], costs: list[int], outputs: list[int], ranks: int) -> None:
        """Count one request over a group of ranks."""
        ours = even_shares(costs, ranks)
        peers = longest_first([grid.patches for grid in grids], ranks)
        received = received_bytes(outputs, ours)
        prove(case, list(received) == arrivals(outputs, ours), "bytes received")
        self.busiest[OURS] += _most(costs, ours)
        self.busiest[PEERS] += _most(costs, peers)
        self.busiest[BOUND] += least_load(costs, ranks)
        self.received[OURS] += sum(received)
        gathered = padded_bytes(outputs, peers)
        self.received[PEERS] += ranks * (gathered - gathered // ranks)
        self.busy += sum(1 for images in ours if images)


def a_day(config: VisionConfig, count: int) -> list[Row]:
    """A day over 16, 128 and 1,024 ranks, in groups of sixteen and as one group.

    Args:
        config: The model.
        count: Requests.

    Returns:
        Rows for each layout.
    """
    requests = day(config, count)
    flops = {grid: image_flops(config, grid) for grid in {grid for grids in requests for grid in grids}}
    costs = [[flops[grid] for grid in grids] for grids in requests]
    outputs = [[_output(config, grid) for grid in grids] for grids in requests]
    about = f"a day of {count:,} requests to {config.family}"
    rows = [
        Row(about, OURS, "pictures", sum(map(len, requests)), "pictures"),
        Row(about, OURS, "patches", sum(grid.patches for grids in requests for grid in grids), "patches"),
        Row(about, OURS, "features", sum(map(sum, outputs))),
        Row(about, OURS, "operations", sum(map(sum, costs)) / 1e12, "TFLOP"),
    ]
    # Whatever the number of groups, a request meets sixteen ranks in one of them.
    for size in RANKS:
        tally = _Tally()
        name = f"one group of {size:,}"
        for grids, each, bytes_of in zip(requests, costs, outputs, strict=True):
            tally.add(name, grids, each, bytes_of, size)
        for ranks in RANKS if size == GROUP else (size,):
            groups = ranks // size
            case = f"{about}: {f'{groups} groups of {size}' if groups > 1 else name}"
            loads = [0] * groups
            for each in costs:  # a request goes to the group with the least so far
                loads[loads.index(min(loads))] += sum(each)
            rows += [Row(case, who, "busiest rank, summed", of / 1e12, "TFLOP") for who, of in tally.busiest.items()]
            rows += [Row(case, who, "received by all ranks", of) for who, of in tally.received.items()]
            rows += [
                Row(case, OURS, "ranks with a picture, of a group", round(tally.busy / count, 6), "ranks"),
                Row(case, OURS, "part of a group in use", round(sum(loads) / tally.busiest[OURS] / size, 6), "x"),
                Row(case, OURS, "busiest group over the mean", round(max(loads) * groups / sum(loads), 6), "x"),
            ]
    return rows


def run(extent: str = "usual", said: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Count everything.

    Args:
        extent: A key of ``EXTENTS``.
        said: Told what is done next.

    Returns:
        All rows.

    Raises:
        DivergenceError: Bytes by formula differ from those that arrived.
    """
    much = EXTENTS[extent]
    rows = []
    for family in FAMILIES:
        said(f"{family}: random requests")
        rows += assignment(family_config(family), much.random)
    said("sixteen ranks")
    rows += paper()
    said("a day")
    return rows + a_day(family_config("kimi-k3"), much.day)


# ---- for the page ---------------------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """The tables of ``docs/scale.md``.

    Args:
        rows: Of ``run``.

    Returns:
        Markdown by name.
    """
    cases: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.who, row.metric] = row.value
    near, worst = "requests within 1.05", "worst over the bound"
    busiest, moved = "busiest rank, summed", "received by all ranks"
    settled = ("proven out of reach", "missed", "open")
    drawn = {case: of for case, of in cases.items() if (OURS, worst) in of}
    days = {case: of for case, of in cases.items() if (OURS, "busiest group over the mean") in of}
    sixteen = next(iter(days.values()))[BOUND, busiest]
    mix = [row for row in rows if row.case.startswith("a day") and ": " not in row.case]
    return {
        "assignment": _markdown(
            ["random requests on 8 ranks", LONGEST, OURS, *settled, "peers"],
            [
                [case.partition(":")[0]]
                + [f"{of[who, near]:,.0f}" for who in (LONGEST, OURS)]
                + [f"{of[OURS, name]:,.0f}" for name in settled]
                + [f"{of[PEERS, near]:,.0f}"]
                for case, of in drawn.items()
            ],
        ),
        "worst": _markdown(
            [worst, LONGEST, OURS, "peers"],
            [
                [case.partition(":")[0], *(f"{of[who, worst]:.3f}" for who in (LONGEST, OURS, PEERS))]
                for case, of in drawn.items()
            ],
        ),
        "ranks": _markdown(["rank", "pictures", "patches", "tokens", "TFLOP", "bytes received"], _five()),
        "paper": _markdown(
            ["", "who", "", "value", "unit"], cells([row for row in rows if f"on {GROUP} ranks" in row.case])
        ),
        "mix": _markdown([mix[0].case, "", ""], [line[2:] for line in cells(mix)]),
        "day": _markdown(
            [
                "layout",
                "ranks with a picture",
                "ranks in use",
                "busiest / bound",
                "peers / bound",
                "bound / that of 16",
                "received, GB",
                "peers, GB",
                "peers / ours",
                "groups, max / mean",
            ],
            [
                [
                    case.partition(": ")[2],
                    f"{of[OURS, 'ranks with a picture, of a group']:.2f}",
                    f"{100 * of[OURS, 'part of a group in use']:.1f} %",
                    f"{of[OURS, busiest] / of[BOUND, busiest]:.4f}",
                    f"{of[PEERS, busiest] / of[BOUND, busiest]:.4f}",
                    f"{of[BOUND, busiest] / sixteen:.4f}",
                    f"{of[OURS, moved] / 1e9:,.0f}",
                    f"{of[PEERS, moved] / 1e9:,.0f}",
                    f"{of[PEERS, moved] / of[OURS, moved]:.2f}",
                    f"{of[OURS, 'busiest group over the mean']:.4f}",
                ]
                for case, of in days.items()
            ],
        ),
    }


def _five() -> list[list[str]]:
    """Ranks of the five pictures, those without one as a single line."""
    config = family_config("kimi-k3")
    made = deploy(config, [_grid(config.family, *size) for size in FIVE], dp=GROUP, machine=Machine("cuda"))
    lines = []
    for share in made.shares:
        numbers = (share.plan.patches, share.plan.tokens) if share.plan else (0, 0)
        pictures = ", ".join("{} x {}".format(*FIVE[index]) for index in share.images)
        counts = [*(f"{number:,}" for number in numbers), f"{share.load / 1e12:,.2f}", f"{share.received_bytes:,}"]
        if share.plan or share.ranks[0] == len(FIVE):
            rank = f"{share.ranks[0]}" if share.plan else f"{share.ranks[0]} to {GROUP - 1}"
            lines.append([rank, pictures or "none", *counts])
    return lines


def _markdown(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---", *["---:"] * (len(heads) - 1)], *lines])


def write_page(rows: Sequence[Row], page: Path) -> None:
    """Write the tables into a page, each between its own marks.

    Args:
        rows: Of ``run``.
        page: ``scale.md``.

    Raises:
        InvalidInputError: It is not there, or has no place for a table.
    """
    if not page.is_file():
        raise InvalidInputError(f"{page} is not there, so no tables can be written into it", param="docs")
    text = page.read_text()
    for name, table in tables(rows).items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise InvalidInputError(f"{page} has no place for a table between {begin} and {end}", param="docs")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    page.write_text(text)
