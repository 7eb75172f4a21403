# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Style of all pictures: a title with the GPU, a footer that says what was measured with what, and small files."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from bench.measure.provenance import one_line

DPI = 110
MOST_BYTES = 100_000  # of a PNG: they are kept in git
COLOURS = (256, 128, 64, 32)
FOOTER_SIZE = 7
FOOTER_CHARACTERS_PER_INCH = 16.5  # of that size; a test sees that the footer stays within the picture
TITLE_CHARACTERS_PER_INCH = 9


def describe(figure: Figure, title: str, result: dict[str, Any], more: str = "") -> None:
    """Gives a figure its title, with the GPU, and below it `more` and the result's note; and its footer."""
    width = figure.get_figwidth()
    lines = filter(None, (f"{title}, {result['gpu'] or 'no GPU'}", more, result["note"]))
    figure.suptitle("\n".join(_wrapped(line, width * TITLE_CHARACTERS_PER_INCH) for line in lines))
    footer = _wrapped(one_line(result), width * FOOTER_CHARACTERS_PER_INCH)
    figure.supxlabel(footer, fontsize=FOOTER_SIZE, color="#444444")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as a PNG of few colours, and of fewer until it has at most MOST_BYTES."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    pixels = np.asarray(Image.open(drawn).convert("RGB"))
    for colours in COLOURS:
        small = io.BytesIO()
        _reduced(pixels, colours).save(small, "png", optimize=True)
        if small.tell() <= MOST_BYTES:
            break
    path.write_bytes(small.getvalue())


def _reduced(pixels: np.ndarray, colours: int) -> Image.Image:
    """The picture in the colours that fill most of it: those of cells and markers stay exactly what they are, and the
    many between a letter and its background become the nearest of these. Pillow's own ways blend or round them."""
    packed = pixels.astype(np.int32) @ (1 << 16, 1 << 8, 1)
    found, index, counts = np.unique(packed, return_inverse=True, return_counts=True)
    found = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1)
    palette = found[np.argsort(-counts)[:colours]]
    nearest = np.square(found[:, None] - palette).sum(axis=2).argmin(axis=1)
    image = Image.fromarray(nearest[index].reshape(packed.shape).astype(np.uint8))
    image.putpalette(palette.astype(np.uint8).tobytes())
    return image


def _wrapped(text: str, characters: float) -> str:
    return textwrap.fill(text, int(characters))
