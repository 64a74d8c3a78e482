"""Draw the sample pictures that the page and the README show.

python -m train.samples
"""

from __future__ import annotations

import random
from pathlib import Path

from PIL import Image

from train.draw import TRAIN_WORDS, Scene, make_sample


def _scene(width: int, height: int, seed: int) -> Scene:
    scene = Scene(width, height, random.Random(seed), TRAIN_WORDS)
    scene.base, scene.background = (252, 252, 250), "white"
    scene.image = Image.new("RGB", (width, height), scene.base)
    return scene


def main() -> None:
    """Write the pictures into the package."""
    folder = Path("src/moonvit/demo/samples")
    folder.mkdir(parents=True, exist_ok=True)
    stop = _scene(224, 140, 3)
    stop.write("red", size=56, text="stop")
    stop.image.save(folder / "stop.png", optimize=True)
    shapes = _scene(224, 168, 7)
    for name, colour, cell in (("circle", "blue", (0, 0)), ("star", "orange", (1, 2)), ("square", "green", (2, 0))):
        shapes.shape(name, colour, 48, cell)
    shapes.image.save(folder / "shapes.png", optimize=True)
    number = _scene(200, 112, 8)
    number.write("purple", size=44, text="1729")
    number.image.save(folder / "number.png", optimize=True)
    chart = make_sample(random.Random(21), lambda _: (252, 224), sort="chart")
    chart.images[0].save(folder / "chart.png", optimize=True)


if __name__ == "__main__":
    main()
