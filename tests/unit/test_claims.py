"""``docs/claims.md`` points at tests and commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_claim_is_shown_by_something_that_exists() -> None:
    rows = [line for line in (ROOT / "docs/claims.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    for row in rows:
        shown = row.rsplit("|", 2)[1]
        pointers = re.findall(r"`([^`]+)`", shown)
        assert pointers, row
        for pointer in pointers:
            if pointer.startswith("tests/"):
                file, _, name = pointer.partition("::")
                text = (ROOT / file).read_text()
                assert not name or f"def {name}(" in text, pointer
            elif pointer.startswith("make "):
                assert re.search(rf"^{pointer.split()[1]}:", (ROOT / "Makefile").read_text(), re.M), pointer
            elif pointer.startswith("python -m "):
                assert (ROOT / (pointer.split()[2].replace(".", "/") + ".py")).exists(), pointer
            else:
                raise AssertionError(f"{pointer} is neither a test nor a command")
