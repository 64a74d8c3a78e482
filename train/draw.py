"""Pictures the demo model learns from, drawn here: words, numbers, shapes, bar charts, and questions about them.

Everything follows from a ``random.Random``; nothing is downloaded. The fonts are those that pip packages ship.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CELL = 28
"""Pixels along one merged token."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "green": (30, 150, 50),
    "blue": (35, 70, 215),
    "yellow": (245, 215, 30),
    "orange": (250, 135, 15),
    "purple": (125, 40, 165),
    "pink": (250, 130, 190),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "grey": (135, 135, 135),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
PLURALS = {name: "crosses" if name == "cross" else name + "s" for name in SHAPES}
PLACES = (
    ("top left", "top", "top right"),
    ("left", "middle", "right"),
    ("bottom left", "bottom", "bottom right"),
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
SMALLEST_TEXT = 20
"""Font size in pixels."""
SMALL_TEXT = 32.0
"""Largest font size in pixels where a picture is to be hard to read."""
AMBIGUOUS_ALONE = set("0o1li")
"""One of these alone cannot be told from another without context, so no picture shows one alone."""
KINDS = ("read", "colour", "shape", "count", "place", "chart", "multi")


def _split(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(w for i, w in enumerate(words) if i % 8), tuple(w for i, w in enumerate(words) if i % 8 == 0)


TRAIN_WORDS, HELD_OUT_WORDS = _split(sorted(set(Path(__file__).with_name("words.txt").read_text().split())))
"""Words that training pictures show, and words that only evaluation shows."""


@lru_cache(maxsize=1)
def font_files() -> tuple[str, ...]:
    """Paths of the font files that are drawn with, from installed packages."""
    mpl = "mpl-data/fonts/ttf/{}.ttf"
    wanted = (
        ("matplotlib", mpl, "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSerif DejaVuSerif-Bold"),
        ("matplotlib", mpl, "DejaVuSansMono DejaVuSansMono-Bold STIXGeneral STIXGeneralBol cmss10 cmtt10"),
        ("font_roboto", "files/Roboto-{}.ttf", "Regular Medium Bold Italic"),
        ("font_source_sans_pro", "files/SourceSansPro-{}.ttf", "Regular Semibold Bold"),
        ("font_source_serif_pro", "files/SourceSerifPro-{}.ttf", "Regular Bold"),
        ("font_caladea", "files/Caladea-{}.ttf", "Regular Bold"),
        ("font_manrope", "files/Manrope-{}.ttf", "Regular Bold"),
        ("font_hanken_grotesk", "files/HankenGrotesk-{}.otf", "Regular Bold"),
    )
    return tuple(
        str(resources.files(package).joinpath(form.format(name)))
        for package, form, names in wanted
        for name in names.split()
    )


@lru_cache(maxsize=4096)
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


@dataclass
class Mark:
    """A glyph, shape or bar in a picture, for the dense labels of training.

    Attributes:
        box: Left, top, right and bottom in pixels.
        glyph: The character, for a letter or digit.
        index: Place of the character in its string.
        shape: Name, for a shape.
        colour: Name of its colour.
        place: One of the nine places its thing is in, row by row; a letter belongs to its text.
        centre: "shape", "bar" or "text" where the thing counts once, in the middle of the box; else None.
        counts: For a shape, how many shapes the picture has, of any kind, of this name and of this colour.
    """

    box: tuple[float, float, float, float]
    glyph: str | None = None
    index: int = 0
    shape: str | None = None
    colour: str | None = None
    place: int = 0
    centre: str | None = None
    counts: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Turn:
    """One question about the pictures, the answer, and the kind it counts under."""

    question: str
    answer: str
    kind: str


@dataclass
class Sample:
    """Pictures and what is asked about them, in order."""

    images: list[Image.Image]
    turns: list[Turn]
    marks: list[list[Mark]]


@dataclass
class _Thing:
    """An object placed in a scene: a text or a shape."""

    name: str
    colour: str
    box: tuple[float, float, float, float]
    text: str | None = None

    @property
    def centre(self) -> tuple[float, float]:
        x0, y0, x1, y1 = self.box
        return (x0 + x1) / 2, (y0 + y1) / 2


@dataclass
class Scene:
    """One picture while it is being drawn."""

    width: int
    height: int
    rng: random.Random
    words: Sequence[str]
    easy: float = 0.0
    invented: float = 0.0
    image: Image.Image = field(init=False)
    background: str = field(init=False)
    things: list[_Thing] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.background = rng.choice(("white", "white", "white", "black", "grey", *COLOURS))
        base = _shade(self.background, rng, 12)
        if rng.random() < 0.35:
            base = tuple(int(c + (255 - c) * rng.uniform(0.6, 0.9)) for c in base)  # type: ignore[assignment]
            self.background = "white" if self.background in ("white", "grey", "black") else f"pale {self.background}"
        self.image = Image.new("RGB", (self.width, self.height), base)
        if rng.random() < 0.2:
            ramp = np.linspace(
                -rng.uniform(0, 16), rng.uniform(0, 16), self.width if rng.random() < 0.5 else self.height
            )
            pixels = np.asarray(self.image).astype(np.int16)
            pixels = pixels + (ramp[None, :, None] if len(ramp) == self.width else ramp[:, None, None]).astype(np.int16)
            self.image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        self.base = base

    def free_colours(self) -> list[str]:
        """Colours that stand out from the background and are not used yet."""
        used = {thing.colour for thing in self.things}
        names = [name for name in COLOURS if name not in used and self._stands_out(name)]
        self.rng.shuffle(names)
        return names

    def _stands_out(self, name: str) -> bool:
        if self.background.split()[-1] == name:
            return False
        ink = COLOURS[name]
        return (
            sum(abs(a - b) for a, b in zip(ink, self.base, strict=True)) > 150
            and abs(_luma(ink) - _luma(self.base)) > 30
        )

    def place(self, width: float, height: float, tries: int = 12) -> tuple[float, float, float, float] | None:
        """A free box of a size, or None when the picture is full."""
        if width > self.width - 2 or height > self.height - 2:
            return None
        for _ in range(tries):
            x0 = self.rng.uniform(1, self.width - width - 1)
            y0 = self.rng.uniform(1, self.height - height - 1)
            box = (x0, y0, x0 + width, y0 + height)
            gap = 3
            if all(
                box[2] + gap < other.box[0]
                or other.box[2] + gap < box[0]
                or box[3] + gap < other.box[1]
                or other.box[3] + gap < box[1]
                for other in self.things
            ):
                return box
        return None

    def string(self, longest: int) -> str:
        """A word, a number or an invented word of at most this many characters."""
        rng = self.rng
        longest = max(1, min(8, longest))
        letters = rng.random() < self.invented
        roll = rng.random()
        if roll < 0.6:
            for _ in range(20):
                word = rng.choice(self.words)
                if letters:
                    word = word[: rng.randint(1, len(word))] + rng.choice(self.words)[-rng.randint(1, 4) :]
                if len(word) <= longest:
                    return word
        length = rng.randint(1, longest)
        alphabet = LETTERS if letters else DIGITS
        while True:
            text = "".join(rng.choice(alphabet) for _ in range(length))
            if length > 1 or text not in AMBIGUOUS_ALONE:
                return text

    def write(self, colour: str, size: int | None = None, text: str | None = None) -> _Thing | None:
        """Write a string somewhere free; None when there is no room."""
        rng = self.rng
        room = min(self.width, self.height)
        if size is None:
            top = min(88.0 if self.easy >= 0 else SMALL_TEXT, room * 0.8)
            low = SMALLEST_TEXT + 8 * max(0.0, self.easy)
            size = int(math.exp(rng.uniform(math.log(low), math.log(max(low + 1, top)))))
        font = _font(rng.choice(font_files()), size)
        if text is None:
            text = self.string(int((self.width - 8) / (size * 0.62)))
        shown = rng.choice((text, text, text.upper(), text.upper(), text.capitalize()))
        ends = [0.0]
        for end in range(1, len(shown) + 1):
            ends.append(font.getlength(shown[:end]))
        left, top_, right, bottom = font.getbbox(shown)
        box = self.place(right - left + 2, bottom - top_ + 2)
        if box is None:
            return None
        x, y = box[0] + 1 - left, box[1] + 1 - top_
        ImageDraw.Draw(self.image).text((x, y), shown, font=font, fill=_shade(colour, rng, 14))
        thing = _Thing("text", colour, box, text)
        self.things.append(thing)
        for index, glyph in enumerate(text):
            span = (x + ends[index], box[1], x + ends[index + 1], box[3])
            self.marks.append(Mark(span, glyph=glyph, index=index, colour=colour, place=self.third(box)))
        self.marks.append(Mark(box, place=self.third(box), centre="text"))
        return thing

    def shape(
        self, name: str, colour: str, size: float | None = None, cell: tuple[int, int] | None = None
    ) -> _Thing | None:
        """Draw a shape somewhere free, or in a cell (row, column) of the 3 x 3 places."""
        rng = self.rng
        room = min(self.width, self.height)
        if size is None:
            low, high = max(12.0, room * 0.12), max(16.0, min(170.0, room * 0.45))
            size = rng.uniform(low, high)
        if cell is None:
            box = self.place(size, size)
        else:
            size = min(size, room * 0.3)
            box = _in_cell(self, size, size, cell)
        if box is None:
            return None
        draw_shape(ImageDraw.Draw(self.image), name, box, _shade(colour, rng, 14))
        thing = _Thing(name, colour, box)
        self.things.append(thing)
        inset = size * 0.1
        inner = (box[0] + inset, box[1] + inset, box[2] - inset, box[3] - inset)
        self.marks.append(Mark(inner, shape=name, colour=colour, place=self.third(box), centre="shape"))
        return thing

    def third(self, box: tuple[float, float, float, float]) -> int:
        """Number of the place that the middle of a box is in, row by row."""
        row = min(2, int(3 * (box[1] + box[3]) / 2 / self.height))
        return 3 * row + min(2, int(3 * (box[0] + box[2]) / 2 / self.width))

    def finish(self) -> Image.Image:
        """The picture, sometimes with a little noise as a camera or a codec would leave. Shapes are counted now."""
        shapes = [mark for mark in self.marks if mark.shape is not None]
        for mark in shapes:
            same_name = sum(other.shape == mark.shape for other in shapes)
            mark.counts = len(shapes), same_name, sum(other.colour == mark.colour for other in shapes)
        if self.rng.random() < 0.25:
            noise = np.random.default_rng(self.rng.getrandbits(32)).integers(-8, 9, (self.height, self.width, 3))
            pixels = np.asarray(self.image).astype(np.int16) + noise
            self.image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        return self.image


def _luma(colour: tuple[int, ...]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def _shade(name: str, rng: random.Random, spread: int) -> tuple[int, int, int]:
    r, g, b = (max(0, min(255, c + rng.randint(-spread, spread))) for c in COLOURS[name])
    return r, g, b


def _in_cell(
    scene: Scene, width: float, height: float, cell: tuple[int, int]
) -> tuple[float, float, float, float] | None:
    """A box whose centre lies in one of the nine places, clear of the borders between them."""
    row, column = cell
    rng = scene.rng
    cx = rng.uniform(*_core(column)) * scene.width
    cy = rng.uniform(*_core(row)) * scene.height
    cx = min(max(cx, width / 2 + 1), scene.width - width / 2 - 1)
    cy = min(max(cy, height / 2 + 1), scene.height - height / 2 - 1)
    return cx - width / 2, cy - height / 2, cx + width / 2, cy + height / 2


def _core(third: int) -> tuple[float, float]:
    return ((0.0, 0.25), (0.42, 0.58), (0.75, 1.0))[third]


def place_name(thing: _Thing, scene: Scene) -> str | None:
    """Which of the nine places a thing is in; None when it is near a border between two."""
    x, y = thing.centre
    names: list[int] = []
    for value in (y / scene.height, x / scene.width):
        third = next((k for k in range(3) if _core(k)[0] <= value <= _core(k)[1]), None)
        if third is None:
            return None
        names.append(third)
    return PLACES[names[0]][names[1]]


def draw_shape(
    draw: ImageDraw.ImageDraw, name: str, box: tuple[float, float, float, float], fill: tuple[int, int, int]
) -> None:
    """Fill one of ``SHAPES`` into a box."""
    x0, y0, x1, y1 = box
    cx, cy, r = (x0 + x1) / 2, (y0 + y1) / 2, (x1 - x0) / 2
    if name == "circle":
        draw.ellipse(box, fill=fill)
    elif name == "square":
        k = 0.08 * (x1 - x0)
        draw.rectangle((x0 + k, y0 + k, x1 - k, y1 - k), fill=fill)
    elif name == "triangle":
        draw.polygon(((cx, y0), (x1, y1), (x0, y1)), fill=fill)
    elif name == "diamond":
        draw.polygon(((cx, y0), (cx + 0.72 * r, cy), (cx, y1), (cx - 0.72 * r, cy)), fill=fill)
    elif name == "cross":
        k = (x1 - x0) * 0.32
        draw.rectangle((x0 + k, y0, x1 - k, y1), fill=fill)
        draw.rectangle((x0, y0 + k, x1, y1 - k), fill=fill)
    else:
        points = []
        for corner in range(10):
            radius = r if corner % 2 == 0 else r * 0.42
            angle = math.pi * (corner / 5 - 0.5)
            points.append((cx + radius * math.cos(angle), cy + radius * math.sin(angle)))
        draw.polygon(points, fill=fill)


# ---- questions ------------------------------------------------------------------------------------------------------

READ_ONE = ("What does it say?", "Read the text.", "What is written here?", "What does the text say?")


def _text_scene(scene: Scene, several: bool) -> list[Turn]:
    rng = scene.rng
    wanted = rng.choice((2, 2, 3, 4)) if several else 1
    for colour in scene.free_colours():
        if len(scene.things) == wanted:
            break
        scene.write(colour)
    if not scene.things:
        scene.write(scene.free_colours()[0], size=SMALLEST_TEXT, text=rng.choice("abcdefghjkmn"))
    turns = []
    texts = [thing for thing in scene.things if thing.text is not None]
    if len(texts) == 1:
        one = texts[0]
        turns.append(Turn(rng.choice(READ_ONE), str(one.text), "read"))
        if rng.random() < 0.5:
            turns.append(Turn("What colour is the text?", one.colour, "colour"))
        place = place_name(one, scene)
        if place and rng.random() < 0.7:
            turns.append(Turn("Where is the text?", place, "place"))
    else:
        for thing in rng.sample(texts, min(3, len(texts))):
            turns.append(Turn(f"What does the {thing.colour} text say?", str(thing.text), "read"))
            place = place_name(thing, scene)
            if place and rng.random() < 0.4:
                turns.append(Turn(f"Where is the {thing.colour} text?", place, "place"))
    return turns


def _shape_scene(scene: Scene, drill: bool) -> list[Turn]:
    rng = scene.rng
    room = min(scene.width, scene.height)
    wanted = rng.randint(2 if drill else 1, 6)
    style = rng.uniform(0.3, 1.2) if drill else rng.random()
    colours = scene.free_colours()
    if style > 1.0:
        colours = colours[: rng.randint(2, 3)]
    size = None if wanted < 3 else rng.uniform(max(11.0, room * 0.11), max(14.0, min(120.0, room * 0.27)))
    for number in range(wanted):
        if style < 0.3 and scene.things:
            name, colour = scene.things[0].name, scene.things[0].colour
        elif style < 0.5 and scene.things:
            name, colour = scene.things[0].name, rng.choice(colours)
        else:
            name, colour = rng.choice(SHAPES), colours[number % len(colours)] if style < 0.8 else rng.choice(colours)
        if wanted == 1 and rng.random() < 0.6:
            scene.shape(name, colour, size, (rng.randrange(3), rng.randrange(3)))
        else:
            scene.shape(name, colour, size and size * rng.uniform(0.85, 1.15))
    shapes = [thing for thing in scene.things if thing.text is None]
    turns: list[Turn] = []
    if not shapes:
        return turns
    names = [thing.name for thing in shapes]
    hues = [thing.colour for thing in shapes]
    counts = [Turn("How many shapes are there?", str(len(shapes)), "count")]
    counts += [
        Turn(f"How many {PLURALS[name]} are there?", str(names.count(name)), "count") for name in sorted({*names})
    ]
    if len(shapes) > 1:
        for colour in sorted({*hues}):
            counts.append(Turn(f"How many {colour} shapes are there?", str(hues.count(colour)), "count"))
    turns += rng.sample(counts, min(len(counts), rng.randint(1, 4)))
    if len(shapes) == 1:
        turns.append(Turn("What shape is it?", names[0], "shape"))
        turns.append(Turn(rng.choice(("What colour is it?", "What colour is the shape?")), hues[0], "colour"))
        place = place_name(shapes[0], scene)
        if place:
            turns.append(Turn(rng.choice(("Where is it?", "Where is the shape?")), place, "place"))
    for thing in shapes:
        if names.count(thing.name) == 1:
            turns.append(Turn(f"What colour is the {thing.name}?", thing.colour, "colour"))
            place = place_name(thing, scene)
            if place:
                turns.append(Turn(f"Where is the {thing.name}?", place, "place"))
        if hues.count(thing.colour) == 1:
            turns.append(Turn(f"What shape is {thing.colour}?", thing.name, "shape"))
            place = place_name(thing, scene)
            if place and rng.random() < 0.5:
                turns.append(Turn(f"Where is the {thing.colour} shape?", place, "place"))
    return turns


def _chart_scene(scene: Scene, drill: bool) -> list[Turn]:
    rng = scene.rng
    draw = ImageDraw.Draw(scene.image)
    colours = scene.free_colours()
    most = min(5, len(colours), (scene.width - 8) // 18)
    number = rng.randint(2, max(2, most))
    labelled = scene.height >= 84 and scene.width / number >= 24
    label_size = int(min(rng.uniform(SMALLEST_TEXT, 28), scene.width / number * 0.9)) if labelled else 0
    left, right = scene.width * rng.uniform(0.03, 0.12), scene.width * rng.uniform(0.88, 0.97)
    bottom = scene.height * rng.uniform(0.93, 0.98) - (label_size * 1.15 if labelled else 0)
    top = scene.height * rng.uniform(0.03, 0.12)
    step = (right - left) / number
    levels = sorted(rng.sample(range(4, 21), number))
    tallest = levels[-1]
    if levels[-2] > tallest * 0.86:
        levels = [min(level, max(2, int(tallest * 0.86))) for level in levels[:-1]] + [tallest]
    rng.shuffle(levels)
    labels = rng.choice(("ABCDE"[:number], "ABCDE"[:number], "".join(rng.sample("ABCDEFGHJKLMNPRSTUVWXYZ", number))))
    font = _font(rng.choice(font_files()), label_size) if labelled else None
    ink = _shade("black" if sum(scene.base) > 380 else "white", rng, 10)
    scale = (bottom - top) / max(levels) * rng.uniform(0.8, 1.0)
    for number_, level in enumerate(levels):
        x0 = left + step * number_ + step * 0.12
        box = (x0, bottom - level * scale, x0 + step * 0.76, bottom)
        draw.rectangle(box, fill=_shade(colours[number_], rng, 14))
        scene.things.append(_Thing("bar", colours[number_], box, labels[number_] if labelled else None))
        scene.marks.append(Mark(box, colour=colours[number_], place=scene.third(box), centre="bar"))
        if font is not None:
            glyph = labels[number_]
            wide = font.getlength(glyph)
            x = x0 + step * 0.38 - wide / 2
            y = bottom + 1
            bounds = font.getbbox(glyph)
            draw.text((x, y - bounds[1] + 1), glyph, font=font, fill=ink)
            scene.marks.append(Mark((x, y, x + wide, y + bounds[3] - bounds[1] + 1), glyph=glyph.lower()))
    if rng.random() < 0.5:
        draw.line((left, bottom, right, bottom), fill=ink, width=1)
    best = levels.index(max(levels))
    turns = [Turn("What colour is the tallest bar?", colours[best], "chart")]
    if labelled:
        turns.append(Turn("Which bar is the tallest?", labels[best].lower(), "chart"))
    if drill or rng.random() < 0.3:
        turns.append(Turn("How many bars are there?", str(number), "count"))
    return turns


def _mixed_scene(scene: Scene) -> list[Turn]:
    """One text and a few shapes in one picture."""
    rng = scene.rng
    colours = scene.free_colours()
    scene.write(colours[0])
    for colour in colours[1 : 1 + rng.randint(1, 3)]:
        scene.shape(rng.choice(SHAPES), colour)
    turns: list[Turn] = []
    for thing in scene.things:
        if thing.text is not None:
            turns.append(Turn(rng.choice(READ_ONE), thing.text, "read"))
            turns.append(Turn("What colour is the text?", thing.colour, "colour"))
    shapes = [thing for thing in scene.things if thing.text is None]
    names = [thing.name for thing in shapes]
    for thing in shapes:
        turns.append(Turn(f"What shape is {thing.colour}?", thing.name, "shape"))
        if names.count(thing.name) == 1:
            turns.append(Turn(f"What colour is the {thing.name}?", thing.colour, "colour"))
    if shapes:
        turns.append(Turn("How many shapes are there?", str(len(shapes)), "count"))
    return turns


def _multi_turns(scenes: list[Scene], rng: random.Random) -> list[Turn]:
    turns: list[Turn] = []
    texts = [s.things[0].text if len(s.things) == 1 else None for s in scenes]
    for number, scene in enumerate(scenes, 1):
        thing = scene.things[0] if scene.things else None
        if thing is None:
            continue
        if thing.text is not None:
            turns.append(Turn(f"What does picture {number} say?", thing.text, "multi"))
            if texts.count(thing.text) == 1:
                turns.append(Turn(f'Which picture says "{thing.text}"?', str(number), "multi"))
            turns.append(Turn(f"What colour is the text in picture {number}?", thing.colour, "multi"))
        elif len(scene.things) == 1:
            turns.append(Turn(f"What shape is in picture {number}?", thing.name, "multi"))
            turns.append(Turn(f"What colour is the shape in picture {number}?", thing.colour, "multi"))
            names = [t.name for s in scenes for t in s.things]
            if names.count(thing.name) == 1:
                turns.append(Turn(f"Which picture shows a {thing.name}?", str(number), "multi"))
        else:
            turns.append(Turn(f"How many shapes are in picture {number}?", str(len(scene.things)), "multi"))
    return turns


def _multi_scene(scene: Scene, drill: bool) -> None:
    rng = scene.rng
    roll = rng.uniform(0.0, 1.25) if drill else rng.random()
    colours = scene.free_colours()
    if roll < 0.5 and scene.write(colours[0]) is not None:
        return
    if roll < 0.85:
        scene.shape(rng.choice(SHAPES), colours[0])
        return
    for _ in range(rng.randint(2, 6)):
        scene.shape(rng.choice(SHAPES), rng.choice(colours), max(11.0, min(scene.width, scene.height) * 0.2))


SizeOf = Callable[[int], tuple[int, int]]
MIX = {"read": 0.31, "texts": 0.12, "shapes": 0.27, "chart": 0.08, "mixed": 0.07, "multi": 0.15}
"""Share of each sort of scene in training."""


def make_sample(
    rng: random.Random,
    size: SizeOf,
    words: Sequence[str] = TRAIN_WORDS,
    sort: str | None = None,
    easy: float = 0.0,
    most_turns: int = 4,
    invented: float = 0.0,
    drill: bool = False,
) -> Sample:
    """Draw one sample.

    Args:
        rng: Source of every choice.
        size: Gives (width, height) in pixels of the n-th picture.
        words: Words that may be written.
        sort: One of ``MIX``; drawn from it when None.
        easy: 1 draws only large letters, 0 the full range, -1 only small ones.
        most_turns: Questions at most.
        invented: Share of strings that are no words: two words spliced, or letters at random.
        drill: Draw more of what is learned last: three pictures, several shapes of a colour, bars to count.

    Returns:
        One to three pictures with at least one question.
    """
    while True:
        chosen = sort or rng.choices(list(MIX), list(MIX.values()))[0]
        scenes = []
        for number in range(rng.choice((2, 3, 3) if drill else (2, 2, 3)) if chosen == "multi" else 1):
            width, height = size(number)
            scenes.append(Scene(width, height, rng, words, easy, invented))
        scene = scenes[0]
        if chosen == "multi":
            for each in scenes:
                _multi_scene(each, drill)
            turns = _multi_turns(scenes, rng)
        elif chosen == "shapes":
            turns = _shape_scene(scene, drill)
        elif chosen == "chart":
            turns = _chart_scene(scene, drill)
        elif chosen == "mixed":
            turns = _mixed_scene(scene)
        else:
            turns = _text_scene(scene, several=chosen == "texts")
        if turns:
            rng.shuffle(turns)
            return Sample([s.finish() for s in scenes], turns[:most_turns], [s.marks for s in scenes])


def make_page(rng: random.Random, width: int, height: int, easy: float = 0.0) -> tuple[Image.Image, list[Mark]]:
    """Draw a picture full of strings and shapes, for learning what stands where before any question is asked.

    Args:
        rng: Source of every choice.
        width: Pixels.
        height: Pixels.
        easy: As in ``make_sample``.

    Returns:
        The picture and everything in it.
    """
    scene = Scene(width, height, rng, TRAIN_WORDS, easy, invented=0.5)
    colours = scene.free_colours()
    fails = 0
    while fails < 3:
        colour = rng.choice(colours)
        if rng.random() < 0.8:
            low = SMALLEST_TEXT + 8 * max(0.0, easy)
            size = int(math.exp(rng.uniform(math.log(low), math.log(max(low + 1, min(72.0, height * 0.7))))))
            made = scene.write(colour, size)
        else:
            made = scene.shape(
                rng.choice(SHAPES), colour, rng.uniform(14, max(16, min(90.0, min(width, height) * 0.4)))
            )
        fails += made is None
    return scene.finish(), scene.marks
