"""The levels of the house, read from the source: a room imports only rooms above it, and its own libraries."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "moonvit"

HOUSE: list[tuple[int, str, set[str]]] = [
    (0, "errors", set()),
    (0, "grids", set()),
    (1, "families", set()),
    (1, "plan", set()),
    (1, "deploy", set()),
    (1, "stock", set()),
    (1, "cache", set()),
    (2, "headers", set()),
    (2, "sources", {"httpx"}),
    (2, "images", {"PIL", "numpy"}),
    (2, "preprocess", {"PIL", "numpy"}),
    (3, "attention", {"torch"}),
    (3, "quantised", {"torch"}),
    (3, "model", {"torch"}),
    (3, "reference", {"torch"}),
    (4, "checkpoint", {"torch", "safetensors", "huggingface_hub"}),
    (4, "graphs", {"torch"}),
    (4, "parallel", {"torch"}),
    (5, "encoder", {"torch", "numpy"}),
    (5, "compare", {"torch"}),
    (5, "jobs", {"torch"}),
    (6, "prompts", {"tokenizers", "tiktoken"}),
    (7, "engines", {"torch", "transformers", "vllm"}),
    (
        8,
        "server",
        {"fastapi", "pydantic", "pydantic_core", "pydantic_settings", "prometheus_client", "starlette", "uvicorn"},
    ),
    (8, "bench", {"torch", "matplotlib", "transformers"}),
    (9, "cli", {"typer", "rich"}),
]
"""Level, room, and the third-party libraries it may import; the order is that of the rows."""
ORDER = {room: row for row, (_, room, _) in enumerate(HOUSE)}
MAY = {room: libraries for _, room, libraries in HOUSE}
SHARED = {"torch", "numpy", "PIL"}
"""Libraries that are the language of several rooms; every other one has a single room, a rival in benchmarks apart."""
RIVALS = {"transformers"}
"""Libraries that benchmarks measure, wherever else they have their room."""
LIGHT = {"errors", "families", "grids", "plan"}
"""What ``import moonvit`` may bring."""


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of everything a file imports, at the top, inside functions, and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "import_module"
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def tops(names: Iterator[str]) -> tuple[set[str], set[str]]:
    """Rooms of ours, and third-party libraries."""
    ours, theirs = set(), set()
    for name in names:
        first, *rest = name.split(".")
        if first == "moonvit":
            ours.add(rest[0] if rest and rest[0] in ORDER else "")
        elif first not in sys.stdlib_module_names:
            theirs.add(first)
    return ours, theirs


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_from_rows_above(path: Path) -> None:
    ours, theirs = tops(imports(ast.parse(path.read_text())))
    room = room_of(path)
    if room == "__main__":
        assert ours == {"cli"} and not theirs
        return
    if room == "__init__":
        assert not theirs
        tree = ast.parse(path.read_text())
        at_once = {name.split(".")[1] for node in tree.body for name in imports_of_statement(node)}
        assert at_once == LIGHT
        return
    assert room in ORDER, f"{room} has no row in the house"
    assert "" not in ours, f"{room} imports the package itself, which stands below it"
    for other in ours - {room}:
        assert ORDER[other] < ORDER[room], f"{room} imports {other}, which stands below it"
    assert theirs <= MAY[room], f"{room} imports {theirs - MAY[room]}"


def imports_of_statement(node: ast.stmt) -> list[str]:
    """Names of ours that a statement at the top of a file imports when it runs."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [name for name in imports(node) if name.startswith("moonvit.")]
    return []


def test_rows_go_up() -> None:
    levels = [level for level, _, _ in HOUSE]
    assert levels == sorted(levels)
    assert set(ORDER) >= {room_of(path) for path in files()} - {"__init__", "__main__"}


def test_each_library_has_one_room() -> None:
    for library in set().union(*MAY.values()) - SHARED:
        rooms = {room for room in MAY if library in MAY[room]}
        assert len(rooms - {"bench"} if library in RIVALS else rooms) == 1
    used: dict[str, set[str]] = {}
    for path in files():
        for library in tops(imports(ast.parse(path.read_text())))[1]:
            used.setdefault(room_of(path), set()).add(library)
    assert used == {room: libraries for room, libraries in MAY.items() if libraries}, "the table says more than is used"


def test_no_torch_below_the_tower() -> None:
    for level, _, libraries in HOUSE:
        assert level > 2 or "torch" not in libraries


def test_the_table_for_people_says_the_same() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| (\d) \| (.*) \|$", text, re.M)
    shown = [(int(level), re.findall(r"`(\w+)(?:\.py|/)`", rooms)) for level, rooms in rows]
    wanted: dict[int, list[str]] = {}
    for level, room, _ in HOUSE:
        wanted.setdefault(level, []).append(room)
    assert shown == list(wanted.items())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import moonvit", {"torch", "numpy", "PIL", "httpx", "typer", "transformers"}),
        ("from moonvit import Budget, Grid, Plan, family_config, MoonvitError", {"torch", "numpy", "PIL"}),
        ("from moonvit import tokens_for; assert tokens_for('kimi-k3', 4000, 3000) == 15444", {"torch", "httpx"}),
        ("import moonvit.images, moonvit.preprocess, moonvit.cache", {"torch", "httpx"}),
        ("import moonvit.cli", {"torch", "numpy", "PIL", "transformers", "fastapi"}),
        ("import moonvit.engines", {"torch", "transformers"}),
        ("import moonvit.bench.report", {"transformers", "matplotlib", "PIL"}),
    ],
)
def test_what_an_import_brings(statement: str, absent: set[str]) -> None:
    code = f"import sys\n{statement}\nprint(*(name for name in {sorted(absent)} if name in sys.modules))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=60)
    assert done.stdout.split() == []
