"""Samples as tensors: patches of one or two grids a batch, token ids, which positions are learned, dense labels."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tiktoken
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from moonvit.prompts.tokenizer import PATTERN
from train.draw import CELL, COLOURS, DIGITS, KINDS, LETTERS, MIX, SHAPES, Mark, Sample, make_page, make_sample
from train.vocabulary import IM_END, MEDIA_PAD, PAD, ranks, special

GLYPH_OF = {glyph: number for number, glyph in enumerate(LETTERS + DIGITS, 1)}
SHAPE_OF = {name: number for number, name in enumerate(SHAPES, 1)}
COLOUR_OF = {name: number for number, name in enumerate(COLOURS, 1)}
LARGE = 0.5
"""Share of grids that may be as large as the stage allows; the others have at most 8 merged tokens a side."""
INVENTED = 0.35
"""Share of the strings of training that are no words."""
DRILLED = 0.5
"""Share of the samples of training that are drawn with ``drill``."""
HARD = {"Which picture": 6.0, "How many": 3.0, "What does picture": 2.0}
"""How the questions begin that are answered wrong most often, and how much sooner they are asked than others."""
APART = 0.85
"""Share of the batches whose questions do not see each other: what one gives away, the next need not find."""
CENTRE_OF = {"shape": 1, "bar": 2, "text": 3}
LABEL_CLASSES = (37, 37, 9, 9, 7, 11, 10, 4, 7, 7, 7)
"""Classes of the dense labels of a patch; 0 is nothing.

Glyph of the left and of the right half, index in the string of each, shape, colour, place of the thing in the picture,
what has its middle here, and how many shapes there are: of any kind, of this name, of this colour (6 is 6 or more).
"""
MIDDLE = 7
"""Number of the label that says what has its middle in a patch."""


def encoding() -> tiktoken.Encoding:
    """The demo vocabulary as a tiktoken encoding without special tokens."""
    return tiktoken.Encoding(
        "moonvit-demo", pat_str=PATTERN, mergeable_ranks={t: r for r, t in enumerate(ranks())}, special_tokens={}
    )


class Row(NamedTuple):
    """One sequence.

    Attributes:
        ids: Token ids.
        flags: 0 for given tokens, n for those of the n-th answer.
        turns: Number of the question that a token belongs to; 0 is seen by all.
        positions: Where each token stands.
        kinds: Kind index of each answer.
    """

    ids: list[int]
    flags: list[int]
    turns: list[int]
    positions: list[int]
    kinds: list[int]


class Renderer:
    """Chat rendering of K2.5 with instant answers, as token ids and a learned-or-not flag for each."""

    def __init__(self) -> None:
        text = encoding().encode_ordinary
        self.text = text
        self.user = [special("<|im_user|>"), *text("user"), special("<|im_middle|>")]
        self.assistant = [special("<|im_assistant|>"), *text("assistant"), special("<|im_middle|>"), special("<think>")]
        self.image = [special("<|media_begin|>"), *text("image"), special("<|media_content|>")]
        self.image_end = [special("<|media_end|>"), *text("\n")]

    def render(self, tokens: list[int], sample: Sample, filler: str = "", apart: bool = False) -> Row:
        """Lay a sample out as one conversation, or as many that share their pictures.

        Args:
            tokens: Merged tokens of each picture.
            sample: Pictures and questions.
            filler: Text that stands in front of the first question.
            apart: Each question follows the pictures and sees no other.

        Returns:
            The row.
        """
        ids = list(self.user)
        for count in tokens:
            ids += [*self.image, *([MEDIA_PAD] * count), *self.image_end]
        pictures = len(ids)
        row = Row(ids, [0] * pictures, [0] * pictures, list(range(pictures)), [])
        for number, turn in enumerate(sample.turns, 1):
            start = len(ids)
            if number > 1 and not apart:
                ids += self.user
            ids += [*self.text(filler + turn.question if number == 1 else turn.question), IM_END, *self.assistant]
            given = len(ids) - start
            ids += [special("</think>"), *self.text(turn.answer), IM_END]
            added = len(ids) - start
            row.flags.extend([0] * given + [number] * (added - given))
            row.turns.extend([number if apart else 0] * added)
            first = pictures if apart else start
            row.positions.extend(range(first, first + added))
            row.kinds.append(KINDS.index(turn.kind))
        return row


@dataclass
class Batch:
    """One training step.

    Attributes:
        grids: Patch rows and columns of each group.
        patches: uint8 (B, L, 588) of each group.
        labels: int64 (B, M, 4, 11) of each group.
        order: (group, index) of every picture in the order of the placeholders.
        ids_ST: Token ids, padded on the right.
        flags_ST: 0, or one more than the number of the answer a token belongs to.
        turns_ST: Number of the question that a token belongs to; 0 is seen by all.
        positions_ST: Where each token stands.
        kinds: Kind index of every answer of the batch.
    """

    grids: list[tuple[int, int]]
    patches: list[Tensor]
    labels: list[Tensor]
    order: list[tuple[int, int]]
    ids_ST: Tensor
    flags_ST: Tensor
    turns_ST: Tensor
    positions_ST: Tensor
    kinds: Tensor


def patchify(image: Image.Image, h: int, w: int) -> np.ndarray[Any, Any]:
    """Pad a picture to a grid and cut it into channel-first patches.

    Args:
        image: RGB, at most 14 h rows and 14 w columns.
        h: Patch rows.
        w: Patch columns.

    Returns:
        uint8 (h * w, 588).
    """
    canvas = np.zeros((h * 14, w * 14, 3), dtype=np.uint8)
    canvas[: image.height, : image.width] = np.asarray(image)
    return canvas.reshape(h, 14, w, 14, 3).transpose(0, 2, 4, 1, 3).reshape(h * w, 588)


def dense_labels(marks: list[Mark], rows: int, columns: int) -> np.ndarray[Any, Any]:
    """What covers each patch; letters are told for its left and its right half.

    Args:
        marks: Things of the picture.
        rows: Merged rows.
        columns: Merged columns.

    Returns:
        int64 (rows * columns, 4, 11): merged token, its patches in merge order, label; zero where there is nothing.
    """
    labels = np.zeros((2 * rows, 2 * columns, len(LABEL_CLASSES)), dtype=np.int64)
    glyphs = np.zeros((2 * rows, 4 * columns, 2), dtype=np.int64)
    for mark in marks:
        if mark.centre is not None:
            x, y = (mark.box[0] + mark.box[2]) / 28, (mark.box[1] + mark.box[3]) / 28
            labels[int(y), int(x), MIDDLE] = CENTRE_OF[mark.centre]
        if mark.glyph is not None:
            _covered(glyphs, mark, 7)[:] = GLYPH_OF[mark.glyph], mark.index + 1
        if mark.colour is not None:
            covered = _covered(labels, mark, 14)
            covered[..., 5], covered[..., 6] = COLOUR_OF[mark.colour], mark.place + 1
            if mark.shape is not None:
                covered[..., 4] = SHAPE_OF[mark.shape]
                covered[..., 8:] = [min(6, count) for count in mark.counts]
    labels[..., 0:2], labels[..., 2:4] = (glyphs[..., what].reshape(2 * rows, -1, 2) for what in (0, 1))
    return labels.reshape(rows, 2, columns, 2, -1).transpose(0, 2, 1, 3, 4).reshape(rows * columns, 4, -1)


def _covered(labels: np.ndarray[Any, Any], mark: Mark, width: int) -> np.ndarray[Any, Any]:
    """The part of a map of labels, this many pixels wide and 14 high each, whose centres a mark covers; never empty."""
    left, right = round(mark.box[0] / width), round(mark.box[2] / width)
    top, bottom = round(mark.box[1] / 14), round(mark.box[3] / 14)
    if left >= right:
        left = int((mark.box[0] + mark.box[2]) / 2 / width)
        right = left + 1
    if top >= bottom:
        top = int((mark.box[1] + mark.box[3]) / 28)
        bottom = top + 1
    part: np.ndarray[Any, Any] = labels[max(0, top) : bottom, max(0, left) : right]
    return part


def _weight(question: str) -> float:
    return next((weight for begin, weight in HARD.items() if question.startswith(begin)), 1.0)


FILLER_WORDS = (
    "What", "does", "the", "text", "say", "there", "are", "many", "pictures", "shapes", "in", "which", "is", "it",
    "where", "colour", "of", "red",
)  # fmt: skip


Page = tuple[int, int, Tensor, Tensor]
"""Rows and columns of patches, uint8 patches (B, L, 588), labels (B, M, 4, 11)."""


class Pages(IterableDataset[Page]):
    """Endless batches of pages: rows and columns of patches, uint8 patches (B, L, 588), labels (B, M, 4, 11).

    Args:
        seed: Seed of every choice.
        cells: Largest side in merged tokens.
        patches: Patches of a batch, about.
        easy: Passed to ``make_page``.
    """

    def __init__(self, seed: str, cells: int, patches: int, easy: float) -> None:
        self.seed, self.cells, self.patches, self.easy = seed, cells, patches, easy

    def __iter__(self) -> Iterator[Page]:
        rng = random.Random(f"pages/{self.seed}")
        while True:
            r, c = rng.randint(2, self.cells), rng.randint(2, self.cells)
            patches, labels = [], []
            for _ in range(max(1, self.patches // (4 * r * c))):
                width, height = rng.randint(CELL * (c - 1) + 1, CELL * c), rng.randint(CELL * (r - 1) + 1, CELL * r)
                image, marks = make_page(rng, width, height, self.easy)
                patches.append(patchify(image, 2 * r, 2 * c))
                labels.append(dense_labels(marks, r, c))
            yield 2 * r, 2 * c, torch.from_numpy(np.stack(patches)), torch.from_numpy(np.stack(labels))


class Stream(IterableDataset[Batch]):
    """Endless batches, each of one or two grids.

    Args:
        seed: Seed of every choice.
        cells: Largest side in merged tokens.
        patches: Patches of a batch, about.
        easy: Passed to ``make_sample``.
        most: Sequences of a batch at most.
    """

    def __init__(self, seed: str, cells: int, patches: int, easy: float, most: int = 80) -> None:
        self.seed, self.cells, self.patches, self.easy, self.most = seed, cells, patches, easy, most

    def __iter__(self) -> Iterator[Batch]:
        info = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{info.id if info else 0}")
        renderer = Renderer()
        while True:
            yield self.batch(rng, renderer)

    def _cells(self, rng: random.Random) -> tuple[int, int]:
        top = self.cells if rng.random() < LARGE else min(self.cells, 8)
        sides = [int(math.exp(rng.uniform(math.log(2), math.log(top + 1)))) for _ in range(2)]
        return max(2, min(top, sides[0])), max(2, min(top, sides[1]))

    def batch(self, rng: random.Random, renderer: Renderer) -> Batch:
        """Draw one batch.

        Args:
            rng: Source of every choice.
            renderer: Lays samples out as ids.

        Returns:
            The batch.
        """
        cells = [self._cells(rng), self._cells(rng)]
        # Large pictures cost far more than words, so more is asked about them.
        turns = 4 if max(r * c for r, c in cells) < 64 else 6
        several = rng.random() < 0.5
        sorts = [sort for sort in MIX if (sort == "multi") == several]
        most = min(self.most, 50) if several else self.most
        fill = rng.random() < 0.04
        apart = rng.random() < APART
        count = 0
        total = 0
        groups: list[list[np.ndarray[Any, Any]]] = [[], []]
        labels: list[list[np.ndarray[Any, Any]]] = [[], []]
        order: list[tuple[int, int]] = []
        rows: list[Row] = []
        while total < self.patches and count < most:
            picked: list[int] = []

            def size(number: int, picked: list[int] = picked) -> tuple[int, int]:
                group = 0 if rng.random() < 0.5 else 1
                del picked[number:]
                picked.append(group)
                r, c = cells[group]
                return rng.randint(max(56, CELL * (c - 1) + 1), CELL * c), rng.randint(
                    max(56, CELL * (r - 1) + 1), CELL * r
                )

            sort = rng.choices(sorts, [MIX[name] for name in sorts])[0]
            easy = self.easy if rng.random() < 0.5 else 0.0
            drill = rng.random() < DRILLED
            sample = make_sample(rng, size, sort=sort, easy=easy, most_turns=99, invented=INVENTED, drill=drill)
            sample.turns.sort(key=lambda turn: rng.expovariate(_weight(turn.question)))  # drawn by weight
            del sample.turns[turns:]
            picked = picked[: len(sample.images)]
            for image, marks, group in zip(sample.images, sample.marks, picked, strict=True):
                r, c = cells[group]
                order.append((group, len(groups[group])))
                groups[group].append(patchify(image, 2 * r, 2 * c))
                labels[group].append(dense_labels(marks, r, c))
                total += 4 * r * c
            filler = ""
            if fill:
                filler = " ".join(rng.choices(FILLER_WORDS, k=rng.randint(4, 60))) + ". "
            rows.append(renderer.render([cells[g][0] * cells[g][1] for g in picked], sample, filler, apart))
            count += 1
        longest = max(len(row.ids) for row in rows)
        ids_ST = torch.full((count, longest), PAD)
        flags_ST, turns_ST, positions_ST = torch.zeros((3, count, longest), dtype=torch.long)
        kinds: list[int] = []
        for number, row in enumerate(rows):
            length = len(row.ids)
            ids_ST[number, :length] = torch.tensor(row.ids)
            flags_ST[number, :length] = torch.tensor([flag and flag + len(kinds) for flag in row.flags])
            turns_ST[number, :length] = torch.tensor(row.turns)
            positions_ST[number, :length] = torch.tensor(row.positions)
            kinds += row.kinds
        used = [group for group in (0, 1) if groups[group]]
        return Batch(
            grids=[(2 * cells[g][0], 2 * cells[g][1]) for g in used],
            patches=[torch.from_numpy(np.stack(groups[g])) for g in used],
            labels=[torch.from_numpy(np.stack(labels[g])) for g in used],
            order=[(used.index(g), i) for g, i in order],
            ids_ST=ids_ST,
            flags_ST=flags_ST,
            turns_ST=turns_ST,
            positions_ST=positions_ST,
            kinds=torch.tensor(kinds),
        )
