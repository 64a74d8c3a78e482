"""Jobs: what is in the folder, whatever happened on the way."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from moonvit import cli, jobs, parallel
from moonvit.checkpoint import save_vision
from moonvit.cli import encoding
from moonvit.encoder import VisionEncoder
from moonvit.errors import EmptyInputError, EngineError, ImageError, InvalidInputError, MoonvitError, NonFiniteError
from moonvit.jobs import files, run_job
from moonvit.jobs.files import RankFile, journal_of, locked
from tests.pictures import noise
from tests.ranks import every

SMALL = {"hidden_size": 48, "num_heads": 2, "intermediate_size": 64, "text_hidden_size": 40, "num_layers": 1}
SIZES = [(100, 60), (300, 200), (28, 28), (60, 100), (29, 400), (280, 210), (90, 90)]


class Cut(BaseException):
    """The end of a process, as far as files can tell."""


class World:
    """A checkpoint, pictures, and jobs with them."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint, self.out = folder / "model", folder / "out"
        self.model = VisionEncoder.from_config("kimi-k2.5", **SMALL).model
        save_vision(self.model, self.checkpoint)
        self.pictures = []
        for number, size in enumerate(SIZES):
            path = folder / f"{number}.png"
            noise(*size, seed=number).save(path)
            self.pictures.append(str(path))

    def encoder(self, **options: Any) -> VisionEncoder:
        return VisionEncoder(self.model, **options)

    def runs(self, ranks: int = 1, out: Path | None = None, **changes: Any) -> list[Any]:
        """Outcome or error of each rank."""
        given = {"checkpoint": self.checkpoint, "pictures": self.pictures, "encoder": None} | changes

        def step(rank: Any) -> Any:
            encoder = given["encoder"] or self.encoder()
            return run_job(encoder, given["checkpoint"], given["pictures"], out or self.out, rank)

        return every(ranks, step)

    def run(self, ranks: int = 1, out: Path | None = None, **changes: Any) -> jobs.Outcome:
        results = self.runs(ranks, out, **changes)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        assert all(result.index == results[0].index for result in results)
        return results[0]

    def refused(self, ranks: int = 1, out: Path | None = None, **changes: Any) -> str:
        """What is said, by all ranks alike."""
        errors = self.runs(ranks, out, **changes)
        assert all(isinstance(error, MoonvitError) for error in errors), errors
        assert len({(type(error), error.message, error.rank) for error in errors}) == 1
        return errors[0].message

    def damage(self, number: int) -> None:
        """Spoil a picture behind its header."""
        path = Path(self.pictures[number])
        path.write_bytes(path.read_bytes()[:60])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pictures that were ever written, by all runs of a test."""
    written: list[int] = []
    append = RankFile.append

    def noted(self: RankFile, features: Sequence[tuple[int, torch.Tensor]]) -> None:
        append(self, features)
        written.extend(index for index, _ in features)

    monkeypatch.setattr(RankFile, "append", noted)
    return written


@pytest.fixture
def cut_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Ends a rank at its n-th write to disk, of which a share is made."""
    write = files.write_all

    def arm(count: int, share: float = 0.5, error: BaseException | None = None) -> None:
        left = [count]

        def cut(file: Any, data: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                write(file, bytes(data)[: int(len(data) * share)])
                raise error or Cut
            write(file, data)

        for module in (files, jobs.identity):
            monkeypatch.setattr(module, "write_all", cut)

    def disarm() -> None:
        for module in (files, jobs.identity):
            monkeypatch.setattr(module, "write_all", write)

    arm.off = disarm  # type: ignore[attr-defined]
    return arm


def visible(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name[0] != "."}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, as its index and as its files say; both must agree."""
    index = json.loads((folder / "index.json").read_text())
    found = {}
    for name in filter(None, index["files"]):
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt", "job": index["job"]}
            for key in file.keys():  # noqa: SIM118
                assert key not in found and index["tensors"][key] == name
                found[key] = file.get_tensor(key)
    assert found.keys() == index["tensors"].keys()
    assert sum(tensor.nbytes for tensor in found.values()) == index["total_bytes"]
    return found


# ---- a job that nothing happens to ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_the_folder_holds_every_picture_once(world: World, ranks: int, appended: list[int]) -> None:
    done = world.run(ranks)
    assert (done.encoded, done.kept) == (len(SIZES), 0) and sorted(appended) == list(range(len(SIZES)))
    found = tensors(world.out)
    assert set(found) == {f"features.{number}" for number in range(len(SIZES))}
    for number, (picture, told) in enumerate(zip(world.pictures, done.index["images"], strict=True)):
        [alone] = world.encoder().encode([picture])
        assert torch.allclose(found[f"features.{number}"], alone.tensor, rtol=1e-5, atol=1e-5)
        assert told == {
            "image": picture,
            "tensor": f"features.{number}",
            "source_size": list(SIZES[number]),
            "grid": list(alone.grid),
            "tokens": alone.tokens,
            "dtype": "float32",
            "shape": [alone.tokens, 40],
        }
    written = done.index["files"]
    assert len(written) == ranks and written.count(None) == max(0, ranks - len(SIZES))
    assert written[0] == f"rank-00000-of-{ranks:05}.safetensors"
    assert {path.name for path in world.out.iterdir()} == {".job.json", "index.json", *filter(None, written)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(world: World, dtype: torch.dtype) -> None:
    world.model = world.model.to(dtype)
    world.run()
    [alone] = world.encoder().encode([world.pictures[1]])
    assert tensors(world.out)["features.1"].equal(alone.tensor) and alone.tensor.dtype == dtype


def test_a_finished_job_does_nothing_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = world.run(2)
    journal_of(world.out, 1, 2).write_text("left behind by a cut after the index")
    before = visible(world.out)
    monkeypatch.setattr(VisionEncoder, "encode_batch", None)
    again = world.run(2)
    assert (again.encoded, again.kept, again.index) == (0, len(SIZES), first.index)
    assert visible(world.out) == before and not journal_of(world.out, 1, 2).exists()


def test_progress_counts_every_picture(world: World) -> None:
    told: list[int] = []
    every(2, lambda ranks: run_job(world.encoder(), world.checkpoint, world.pictures, world.out, ranks, told.append))
    assert sum(told) == len(SIZES)


def test_pictures_may_be_data_urls_and_come_twice(world: World) -> None:
    import base64

    url = "data:image/png;base64," + base64.b64encode(Path(world.pictures[0]).read_bytes()).decode()
    done = world.run(pictures=[world.pictures[0], url, world.pictures[0]])
    found = list(tensors(world.out).values())
    assert len(found) == 3 and found[0].shape == found[1].shape
    assert done.index["images"][1]["image"].startswith("data:sha256:")
    assert world.run(pictures=[world.pictures[0], url, world.pictures[0]]).kept == 3


# ---- a job that is cut off ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_wherever_a_run_is_cut_off_the_next_goes_on(
    world: World, tmp_path: Path, appended: list[int], cut_at: Any, share: float
) -> None:
    whole = tmp_path / "whole"
    world.run(out=whole)
    expected = visible(whole)
    appended.clear()
    for count in range(1, 100):
        cut_at(count, share)
        [result] = world.runs()
        if isinstance(result, jobs.Outcome):
            break
        assert isinstance(result, Cut)
        assert "index.json" not in visible(world.out)
        for name, content in visible(world.out).items():
            assert content == expected[name]
        cut_at.off()
    else:
        raise AssertionError("the job never came to its end")
    # Of the pictures of a cut write some are on disk though nobody said so; they are what is kept.
    assert visible(world.out) == expected and len(set(appended)) == len(appended)
    assert count > 4


def test_a_rank_that_dies_ends_the_others_and_the_rest_is_done_later(
    world: World, tmp_path: Path, appended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(3, out=tmp_path / "whole")
    appended.clear()
    append = RankFile.append

    def dies(self: RankFile, features: Any) -> None:
        if "rank-00001" in self.path.name:
            raise Cut
        append(self, features)

    monkeypatch.setattr(RankFile, "append", dies)
    results = world.runs(3)
    assert isinstance(results[1], Cut)
    assert all(isinstance(results[rank], EngineError) for rank in (0, 2))
    assert not (world.out / "index.json").exists() and len(appended) < len(SIZES)
    before = len(appended)
    monkeypatch.setattr(RankFile, "append", append)
    done = world.run(3)
    assert (done.kept, done.encoded) == (before, len(SIZES) - before)
    assert sorted(appended) == list(range(len(SIZES)))
    assert visible(world.out) == visible(tmp_path / "whole")


SHAPES = {2: (3, 5), 4: (1, 5), 7: (6, 5), 9: (2, 5)}


def rank_file(folder: Path, name: str = "job") -> RankFile:
    return RankFile(folder, 3, 16, name, SHAPES, torch.float16)


def feature(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(SHAPES[index], generator=generator).half()


def written(folder: Path) -> tuple[bytes, bytes]:
    """Part and journal of a rank that was cut off before the end, after every picture; the third failed."""
    folder.mkdir()
    with rank_file(folder) as file:
        file.append([(2, feature(2)), (4, feature(4))])
        file.fail(7, 'damaged, "quoted"\nand odd: \udcff é')
        file.append([(9, feature(9))])
    return file.part.read_bytes(), file.journal.read_bytes()


def go_on(folder: Path, part: bytes | None, journal: bytes | None) -> tuple[set[int], bytes]:
    """What a rank takes over from such files, and its file when it is complete."""
    folder.mkdir(exist_ok=True)
    file = rank_file(folder)
    for path, content in ((file.part, part), (file.journal, journal)):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
    file.path.unlink(missing_ok=True)
    with file:
        kept = file.done | file.failed.keys()
        for index in SHAPES:
            if index not in kept and index != 7:
                file.append([(index, feature(index))])
        if 7 not in kept:
            file.fail(7, "damaged")
        assert file.finish() == "rank-00003-of-00016.safetensors"
    return kept, file.path.read_bytes()


def test_a_journal_cut_at_any_byte_is_good_until_its_last_whole_line(tmp_path: Path) -> None:
    part, journal = written(tmp_path / "cut")
    _, whole = go_on(tmp_path / "whole", part, journal)
    assert len(whole) == len(part)
    order = [2, 4, 7, 9]
    for length in range(len(journal) + 1):
        kept, content = go_on(tmp_path / "torn", part, journal[:length])
        assert kept == set(order[: journal[:length].count(b"\n")]) and content == whole, length
        zeros = journal[:length].ljust(len(journal), b"\0")  # as some file systems leave it
        kept, content = go_on(tmp_path / "torn", part, zeros)
        assert kept <= set(order[: journal[:length].count(b"\n") + 1]) and content == whole, length


def test_a_part_cut_or_changed_anywhere_is_good_until_there(tmp_path: Path) -> None:
    part, journal = written(tmp_path / "cut")
    _, whole = go_on(tmp_path / "whole", part, journal)
    room = len(part) - sum(feature(index).nbytes for index in (2, 4, 9))
    ends = {2: room + 30, 4: room + 40, 7: room + 40, 9: room + 60}
    for length in (0, 1, 8, room - 1, room, room + 1, *range(room + 28, len(part) + 1)):
        kept, content = go_on(tmp_path / "torn", part[:length], journal)
        assert kept == {index for index, end in ends.items() if end <= length} and content == whole, length
    for place in range(room, len(part)):
        spoiled = part[:place] + bytes([part[place] ^ 1]) + part[place + 1 :]
        kept, content = go_on(tmp_path / "torn", spoiled, journal)
        # A complaint has no bytes, and is taken over only if all before it is good.
        assert kept == {index for index, end in ends.items() if end <= place} and content == whole, place
    for more in (b"\0", os.urandom(1000)):
        assert go_on(tmp_path / "torn", part + more, journal) == ({2, 4, 7, 9}, whole)
    assert go_on(tmp_path / "torn", None, journal) == (set(), whole)
    assert go_on(tmp_path / "torn", part, None) == (set(), whole)


@pytest.mark.parametrize(
    "line",
    [
        b"[2, 30, 0]\n",
        b"[3, 30, 1]\n",
        b"[true, 30, 1]\n",
        b"[[], 30, 1]\n",
        b"[2, 30]\n",
        b"{}\n",
        b"7\n",
        b"\n",
        b"\xff\xfe\n",
        b'[7, "damaged", 1]\n',
        b"[2, null, 1]\n",
        b"[2, -1, 1]\n",
    ],
)
def test_a_line_that_is_not_right_is_no_line(tmp_path: Path, line: bytes) -> None:
    part, journal = written(tmp_path / "cut")
    _, whole = go_on(tmp_path / "whole", part, journal)
    assert go_on(tmp_path / "odd", part, line + journal) == (set(), whole)
    first, rest = journal.split(b"\n", 1)
    assert go_on(tmp_path / "odd", part, first + b"\n" + first + b"\n" + rest) == ({2}, whole)  # a picture twice


def test_a_journal_of_another_job_is_worth_nothing(tmp_path: Path) -> None:
    written(tmp_path / "cut")
    with rank_file(tmp_path / "cut", "another") as file:
        assert not file.done and not file.failed


def test_a_complete_file_is_taken_over_and_checked(tmp_path: Path) -> None:
    _, journal = written(tmp_path / "cut")
    with rank_file(tmp_path / "cut") as file:
        file.finish()
    whole = file.path.read_bytes()
    with rank_file(tmp_path / "cut") as file:
        assert file.done == {2, 4, 9} and set(file.failed) == {7} and file.finish() == file.path.name
    assert file.path.read_bytes() == whole
    for content, lines in ((whole[:-1], journal), (whole, journal[:-1]), (whole, b""), (b"foreign", journal)):
        file.path.write_bytes(content)
        file.journal.write_bytes(lines)
        with (
            pytest.raises(InvalidInputError, match="is there, and is not whole or not of this job"),
            rank_file(file.path.parent),
        ):
            pass
        assert file.path.read_bytes() == content


def test_a_header_that_no_reader_takes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_HEADER", 100)
    with (
        pytest.raises(InvalidInputError, match=r"4 pictures on one rank need a header of \d+ bytes, at most 100"),
        rank_file(tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


# ---- refused --------------------------------------------------------------------------------------------------------


def test_another_job_is_refused_in_the_folder_and_said_in_what(world: World, tmp_path: Path) -> None:
    world.run()
    before = visible(world.out)
    first, *rest = world.pictures
    bare = VisionEncoder.from_config("kimi-k2.5", **(SMALL | {"text_hidden_size": 44}))
    half = VisionEncoder.from_config("kimi-k2.5", dtype="bfloat16", **SMALL)
    said = {
        "ranks was 1, now 2": world.refused(2),
        "7 pictures, now 6": world.refused(pictures=rest),
        f"{first}, now {rest[0]}": world.refused(pictures=[rest[0], first, *rest[1:]]),
        "dtype was float32, now bfloat16": world.refused(encoder=half),
        "budget was None, now 33554432": world.refused(encoder=world.encoder(budget="32MiB")),
        "text_hidden_size was 40, now 44": world.refused(encoder=bare),
    }
    os.utime(world.checkpoint / "model.safetensors", ns=(1, 1))
    said["model.safetensors has changed"] = world.refused()
    (world.checkpoint / "preprocessor_config.json").unlink()
    said["3 checkpoint files, now 2"] = world.refused()
    for expected, message in said.items():
        assert message == f"{world.out} holds another job: {expected}"
    assert visible(world.out) == before


def test_a_picture_that_changed_between_runs_is_another_job(world: World) -> None:
    world.run()
    os.utime(world.pictures[2], ns=(1, 1))
    assert world.refused() == f"{world.out} holds another job: {world.pictures[2]} has changed"


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"format": 1}', b"\xff", b"null", b"words"])
def test_what_is_not_ours_is_left_alone(world: World, content: bytes) -> None:
    world.out.mkdir()
    (world.out / "notes.txt").write_text("mine")
    (world.out / ".job.json").write_bytes(content)
    assert world.refused() == f"{world.out} holds another job: its .job.json cannot be read"
    assert {path.name for path in world.out.iterdir()} == {"notes.txt", ".job.json"}
    (world.out / ".job.json").unlink()
    (world.out / "index.json").write_bytes(content)
    assert world.refused(2) == f"{world.out / 'index.json'} is not of a job; choose another folder"
    assert {path.name for path in world.out.iterdir()} == {"notes.txt", "index.json"}
    (world.out / "index.json").unlink()
    colliding = world.out / "rank-00001-of-00002.safetensors"
    colliding.write_bytes(content)
    assert world.refused(2) == f"{colliding} is there, and is not whole or not of this job"
    assert colliding.read_bytes() == content
    colliding.unlink()
    world.run(2)
    (world.out / "index.json").write_bytes(content)
    assert world.refused(2) == f"{world.out / 'index.json'} is not of this job; choose another folder"
    assert (world.out / "notes.txt").read_text() == "mine"


def test_a_file_where_a_rank_has_none_is_refused(world: World) -> None:
    world.out.mkdir()
    (world.out / "rank-00001-of-00002.safetensors").write_bytes(b"")
    assert "is not whole or not of this job" in world.refused(2, pictures=world.pictures[:1])


def test_folders_that_cannot_be(world: World, tmp_path: Path) -> None:
    assert "cannot be written: No such file or directory" in world.refused(2, out=tmp_path / "no" / "where")
    assert "cannot be written: File exists" in world.refused(out=Path(world.pictures[0]))


def test_two_processes_never_work_on_one_job(world: World) -> None:
    world.out.mkdir()
    for name in (".job.json", ".rank-00001-of-00002.journal"):
        with locked(world.out / name):
            said = world.refused(2)
        assert said == f"another process is at work in {world.out}: it holds {name}"
    assert world.run(2).encoded == len(SIZES)


def test_bad_pictures_are_refused_before_any_work(world: World, tmp_path: Path) -> None:
    (tmp_path / "no.png").write_text("no picture")
    errors = world.runs(3, pictures=[*world.pictures, str(tmp_path / "no.png")])
    assert {error.message.split(":")[0] for error in errors} == {"image 7"} and {error.rank for error in errors} == {0}
    assert "image 7" in world.refused(pictures=[*world.pictures, str(tmp_path / "none.png")])
    assert not world.out.exists()
    [error] = world.runs(pictures=[])
    assert isinstance(error, EmptyInputError)


def test_ranks_that_see_different_things_are_refused(world: World, tmp_path: Path) -> None:
    def step(ranks: Any) -> Any:
        pictures = world.pictures[: 5 - ranks.rank // 2]
        return run_job(world.encoder(), world.checkpoint, pictures, world.out, ranks)

    errors = every(3, step)
    assert {(error.message, error.rank) for error in errors} == {("rank 2 and rank 0 differ in pictures", 2)}
    assert not world.out.exists()

    def apart(ranks: Any) -> Any:
        return run_job(world.encoder(), world.checkpoint, world.pictures, tmp_path / f"out{ranks.rank}", ranks)

    errors = every(2, apart)
    assert {error.rank for error in errors} == {1} and "ranks must share it" in errors[0].message


# ---- things that go wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_picture_is_recorded_and_the_others_go_on(
    world: World, tmp_path: Path, ranks: int, cut_at: Any
) -> None:
    for number in (2, 3):
        world.damage(number)
    done = world.run(ranks)
    assert set(tensors(world.out)) == {f"features.{number}" for number in (0, 1, 4, 5, 6)}
    assert [one["index"] for one in done.index["failed"]] == [2, 3]
    assert done.index["failed"][0]["image"] == world.pictures[2]
    assert done.index["failed"][0]["message"].startswith("the PNG file is damaged")
    assert done.index["images"][2]["tensor"] is None and (done.encoded, done.kept) == (5, 0)
    assert world.run(ranks).index == done.index
    if ranks == 1:  # also where it is cut off, after each write
        for count in range(1, 20):
            cut_at(count, 1.0)
            world.runs(out=tmp_path / "cut")
        cut_at.off()
        assert visible(tmp_path / "cut") == visible(world.out)


def test_where_every_picture_failed_there_is_no_file(world: World) -> None:
    for number in range(3):
        world.damage(number)
    done = world.run(2, pictures=world.pictures[:3])
    assert done.index["files"] == [None, None] and len(done.index["failed"]) == 3 and done.index["total_bytes"] == 0
    assert {path.name for path in world.out.iterdir()} == {".job.json", "index.json"}


@pytest.mark.parametrize("change", ["touch", "remove"])
def test_a_picture_that_changes_during_the_job_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    encode = VisionEncoder.encode_batch
    kept = Path(world.pictures[4]).read_bytes()
    before = os.stat(world.pictures[4]).st_mtime_ns

    def changing(self: VisionEncoder, items: Any, plan: Any, batch: Any) -> Any:
        if 4 in batch.indices:
            os.utime(items[4], ns=(1, 1)) if change == "touch" else Path(items[4]).unlink()
        return encode(self, items, plan, batch)

    monkeypatch.setattr(VisionEncoder, "encode_batch", changing)
    [error] = world.runs()
    assert isinstance(error, ImageError) and error.rank == 0
    assert error.message.startswith(f"image 4: {world.pictures[4]} ")
    assert error.message.endswith(("has changed since the job began", "cannot be read: No such file or directory"))
    monkeypatch.setattr(VisionEncoder, "encode_batch", encode)
    Path(world.pictures[4]).write_bytes(kept)
    os.utime(world.pictures[4], ns=(before, before))
    done = world.run()
    assert done.kept > 0 and done.kept + done.encoded == len(SIZES)


def test_features_that_are_not_finite_end_the_job_with_the_right_name(world: World, tmp_path: Path) -> None:
    encoder = world.encoder()
    with torch.no_grad():
        next(encoder.model.parameters()).fill_(float("nan"))
    errors = world.runs(2, pictures=[world.pictures[1], world.pictures[0]], encoder=encoder)
    assert all(isinstance(error, (NonFiniteError, EngineError)) for error in errors)
    for rank, error in enumerate(errors):
        assert isinstance(error, EngineError) or error.message.startswith(f"image {rank}: the encoder gave NaN")
    assert not visible(world.out)


def test_a_full_disk_is_said_and_what_is_finished_is_kept(world: World, cut_at: Any) -> None:
    whole = world.out.parent / "whole"
    world.run(out=whole)
    for count in range(2, 20):
        cut_at(count, 0.7, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        [error] = world.runs()
        if isinstance(error, jobs.Outcome):
            break
        assert isinstance(error, InvalidInputError), error
        assert (
            error.message.startswith(str(world.out)) and "cannot be written: No space left on device" in error.message
        )
    assert count > 4 and visible(world.out) == visible(whole)


def test_an_error_on_one_rank_is_that_of_all() -> None:
    def step(ranks: Any) -> Any:
        def fail() -> int:
            if ranks.rank in (1, 3):
                raise NonFiniteError(f"by {ranks.rank}", param="x")
            return ranks.rank

        return ranks.together(fail)

    for error in every(4, step):
        assert isinstance(error, NonFiniteError)
        assert (error.message, error.param, error.rank) == ("by 1", "x", 1)
    assert every(3, lambda ranks: ranks.together(lambda: ranks.rank)) == [0, 1, 2]


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Runs ``moonvit encode`` in this process: exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moonvit", "encode", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = int(left.code or 0)
        said = capfd.readouterr()
        return code, said.out, said.err

    yield run


def test_the_command_writes_a_folder(world: World, command: Any) -> None:
    words = [*world.pictures, "-m", str(world.checkpoint), "--dtype", "float32"]
    code, out, err = command(*words, "-o", f"{world.out}/")
    assert (code, err) == (0, "") and out.startswith("7 pictures encoded: ") and out.count("\n") == 1
    code, out, err = command(*words, "-o", str(world.out), "--json")  # a directory by now
    document = json.loads(out)
    assert (code, document["encoded"], document["kept"], document["out"]) == (0, 0, 7, str(world.out))
    assert document["images"] == json.loads((world.out / "index.json").read_text())["images"]
    assert ", all of them before: nothing was left to do: " in command(*words, "-o", str(world.out))[1]
    code, out, err = command(*words[1:], "-o", str(world.out))
    assert code == 2 and err == f"moonvit: {world.out} holds another job: 7 pictures, now 6\n"


def test_the_command_says_what_failed_and_leaves_with_its_code(world: World, command: Any) -> None:
    world.damage(3)
    for _ in range(2):
        code, out, err = command(*world.pictures, "-m", str(world.checkpoint), "-o", f"{world.out}/")
        assert code == 2 and out.startswith("6 pictures encoded") and err.count("\n") == 1
        assert err.startswith(f"moonvit: 1 of 7 pictures failed; image 3 ({world.pictures[3][:28]}")


def test_a_header_that_is_refused_is_named(world: World, tmp_path: Path, command: Any) -> None:
    (tmp_path / "x.png").write_text("no picture")
    code, out, err = command(
        *world.pictures, str(tmp_path / "x.png"), "-m", str(world.checkpoint), "-o", f"{world.out}/"
    )
    assert code == 2 and out == "" and "x.png" in err and err.startswith("moonvit: image 7 (") and err.count("\n") == 1


def test_several_ranks_write_into_a_folder(
    world: World, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def two() -> Iterator[Any]:
        class Both(parallel.Ranks):
            def gather(self, value: bytes) -> list[bytes]:
                return [value, value]

            _agree = gather

        both = Both()
        both.size = 2
        yield both

    monkeypatch.setattr(parallel, "launched", two)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in ((), ("-o", str(tmp_path / "x.safetensors")), ("-o", world.pictures[0]), ("-o", "")):
        code, out, err = command(*world.pictures, *words)
        assert code == 2 and out == "" and err.startswith("moonvit: rank 0: 2 ranks write into a folder: name one")
        assert err.count("\n") == 1 and (not words or words[1] in err)
    assert encoding._is_folder(str(tmp_path / "new"), 2) and not encoding._is_folder(str(tmp_path / "new"), 1)
    assert encoding._is_folder(f"{world.pictures[0]}/", 1) and not encoding._is_folder("", 2)
    assert encoding._is_folder("new/", 1) and encoding._is_folder(str(tmp_path), 1)


def test_cuda_under_torchrun_is_the_device_of_the_local_rank(
    world: World, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def opened(model: Any, device: str, *_: Any) -> Any:
        asked.append(device)
        raise InvalidInputError("seen")

    monkeypatch.setattr(encoding, "open_encoder", opened)
    monkeypatch.setenv("LOCAL_RANK", "5")
    for device in ("cuda", "cuda:1", "cpu"):
        assert command(*world.pictures, "-o", f"{world.out}/", "--device", device)[0] == 2
    assert asked == ["cuda:5", "cuda:1", "cpu"]
