"""The error tree is what the top of its file draws, and every class carries its answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from moonvit import errors
from moonvit.errors import InvalidInputError, MissingDependencyError, MoonvitError


def classes(root: type[MoonvitError] = MoonvitError) -> Iterator[type[MoonvitError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from classes(child)


def drawn() -> dict[str, dict[str, object]]:
    """The drawing: indentation gives the parent, words the values; what is left out is inherited."""
    tree: dict[str, dict[str, object]] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"([│├└─ ]*)(\w+Error)\b(.*)", line)
        if not match:
            continue
        depth = len(match[1]) // 4
        del parents[depth:]
        parent = parents[-1] if parents else None
        parents.append(match[2])
        words = match[3].split("also")[0].split()
        entry: dict[str, object] = {"parent": parent}
        for word in words:
            if re.fullmatch(r"\d{3}", word):
                entry["status"] = int(word)
        entry["code"] = [word for word in words if re.fullmatch(r"[a-z_]+", word) and word not in TYPES | {"exit"}]
        entry["type"] = next((word for word in words if word in TYPES), None)
        exits = re.search(r"exit (\d+)", match[3])
        entry["exit"] = int(exits[1]) if exits else None
        tree[match[2]] = entry
    return tree


TYPES = {"server_error", "invalid_request_error"}


def test_the_drawing_is_the_tree() -> None:
    tree = drawn()
    found = {kind.__name__: kind for kind in classes()}
    assert set(tree) == set(found)
    for name, entry in tree.items():
        kind = found[name]
        assert entry["parent"] == (kind.__bases__[0].__name__ if kind is not MoonvitError else None)
        if "status" in entry:
            assert entry["status"] == kind.status, name
        else:
            assert kind.status == kind.__bases__[0].status, name  # type: ignore[attr-defined]
        if entry["code"]:
            assert entry["code"] == [kind.code], name
        if entry["type"]:
            assert entry["type"] == kind.type, name
        if entry["exit"] is not None:
            assert entry["exit"] == kind.exit_code, name


@pytest.mark.parametrize("kind", list(classes()), ids=lambda kind: kind.__name__)
def test_every_error_answers(kind: type[MoonvitError]) -> None:
    error = kind("images[3] is 9, at most 4", param="images[3]")
    assert str(error) == error.message
    assert error.to_dict() == {
        "error": {
            "message": "images[3] is 9, at most 4",
            "type": kind.type,
            "param": "images[3]",
            "code": kind.code,
        }
    }
    assert 400 <= kind.status < 600
    assert (kind.type == "invalid_request_error") == (kind.status < 500 and kind.status != 429)
    assert kind.exit_code > 0
    assert kind("x").param is None


def test_codes_are_distinct() -> None:
    codes = [kind.code for kind in classes()]
    assert len(codes) == len(set(codes))


def test_python_habits() -> None:
    assert issubclass(InvalidInputError, ValueError)
    assert issubclass(MissingDependencyError, ImportError)
