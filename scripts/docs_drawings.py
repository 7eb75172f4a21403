# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Draws the pictures of docs/how-it-works.md and docs/qk-norm-rope.md.

`python scripts/docs_drawings.py` writes docs/images/*.svg.

They are as wide as a phone, so that nothing shrinks there: 400 units, text of 15 and more. They have a background of
their own, light or dark as the reader's system is, so that they can be read on any page.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, MARGIN = 400, 16
INNER = WIDTH - 2 * MARGIN
STYLE = """
text { font: 15px system-ui, sans-serif; fill: var(--ink) }
.title { font-weight: 600; font-size: 16px }
.soft { fill: var(--soft) }
rect { stroke: var(--line) }
.frame { fill: none; stroke: var(--ink); stroke-width: 2 }
.off { fill: none; stroke-dasharray: 4 3 }
.cut { stroke: var(--ink); stroke-dasharray: 4 3 }
.arrow { stroke: var(--ink); stroke-width: 1.5; fill: none; marker-end: url(#head) }
.head { fill: var(--ink) }
.card { fill: var(--card); stroke: var(--line) }
.b0 { fill: var(--b0) } .b1 { fill: var(--b1) } .b2 { fill: var(--b2) } .b3 { fill: var(--b3) }
svg { --card: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #8c959f;
  --b0: #b6dcff; --b1: #ffd9a0; --b2: #bfeab5; --b3: #ecc6f2 }
@media (prefers-color-scheme: dark) { svg { --card: #20242c; --ink: #e9eef4; --soft: #aeb8c4; --line: #6b7684;
  --b0: #1c4f80; --b1: #6d4a12; --b2: #27592c; --b3: #5d3470 } }
"""


def box(x: float, y: float, width: float, height: float, kind: str, label: str = "") -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" class="{kind}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, label, anchor="middle") if label else "")


def text(x: float, y: float, label: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(label)}</text>'


def title(y: float, label: str) -> str:
    return text(MARGIN, y, label, "title")


def note(y: float, *lines: str) -> str:
    return "".join(text(MARGIN, y + 20 * number, line, "soft") for number, line in enumerate(lines))


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path class="arrow" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>'


def drawing(height: float, description: str, *parts: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
        f'height="{height:g}" role="img">\n<title>{escape(description)}</title>\n<style>{STYLE}</style>\n'
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
    )
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
    return head + "\n".join([card, *parts]) + "\n</svg>\n"


def two_kernels() -> str:
    blocks, rows, half = 3, 9, 164
    right = WIDTH - MARGIN - half
    parts = [title(30, "First kernel: P blocks walk the rows")]
    parts += [
        text(MARGIN + half / 2, 56, "x and dy", "", "middle"),
        text(right + half / 2, 56, "dx", "", "middle"),
    ]
    for row in range(rows):
        y = 64 + 24 * row
        label = f"row {row}: block {row % blocks}"
        parts += [box(x, y, half, 22, f"b{row % blocks}", label) for x in (MARGIN, right)]
    parts += [arrow(MARGIN + half + 6, 172, right - 6, 172), arrow(40, 286, 40, 312)]
    parts += [text(54, 304, "each block sums dy * xhat of its rows")]
    for block in range(blocks):
        walked = ", ".join(str(row) for row in range(block, rows, blocks))
        parts.append(box(MARGIN, 318 + 28 * block, INNER, 26, f"b{block}", f"block {block}: rows {walked}"))
    parts += [text(MARGIN, 422, "dw_partial: P rows, float32", "soft")]
    parts += [title(458, "Second kernel: blocks own columns")]
    strip = INNER / 4
    parts += [arrow(MARGIN + strip * (k + 0.5), 468, MARGIN + strip * (k + 0.5), 496) for k in range(4)]
    parts += [box(MARGIN + strip * k, 500, strip, 30, "b3", f"strip {k}") for k in range(4)]
    parts += [
        note(552, "dw: the P rows of dw_partial, added in an", "order that never changes, rounded once")
    ]
    return drawing(588, "Two kernels: dx with partial rows of dw, then their sum", *parts)


def dx_beside_dw() -> str:
    rows, strips, half = 6, 3, 172
    right = WIDTH - MARGIN - half
    parts = [title(30, "One launch, two kinds of blocks")]
    parts += [text(MARGIN + half / 2, 58, "blocks for dx", "", "middle")]
    parts += [text(right + half / 2, 58, "blocks for dw", "", "middle")]
    for row in range(rows):
        parts.append(box(MARGIN, 68 + 26 * row, half, 24, "b0", f"row {row}"))
    strip = half / strips
    for k in range(strips):
        x = right + strip * k
        parts += [
            box(x + 1, 68, strip - 2, 154, "b1", f"strip {k}"),
            arrow(x + strip / 2, 160, x + strip / 2, 212),
        ]
    parts += [arrow(MARGIN + half / 2, 228, MARGIN + half / 2, 250)]
    parts += [arrow(right + half / 2, 228, right + half / 2, 250)]
    parts += [box(MARGIN, 254, half, 30, "b0", "dx, row by row")]
    parts += [box(right, 254, half, 30, "b1", "dw, strip by strip")]
    parts += [note(310, "Both kinds read x and dy. Nobody waits:", "a strip needs rstd, and no row's c.")]
    parts += [title(366, "The launch, block by block")]
    count = rows + strips
    cell = INNER / count
    for k in range(count):
        label = f"s{k}" if k < strips else f"r{k - strips}"
        parts.append(box(MARGIN + cell * k, 378, cell - 2, 30, "b1" if k < strips else "b0", label))
    parts += [note(430, "Strips take longest, so they come first.")]
    return drawing(
        446, "Few rows: blocks for dx, each with a row, beside blocks for dw, each with a strip", *parts
    )


def teams() -> str:
    part = INNER / 4
    middle = [MARGIN + part * (k + 0.5) for k in range(4)]
    parts = [title(30, "A wide row and its team of 4 blocks")]
    parts += [box(MARGIN + part * k, 44, part - 2, 40, f"b{k}", f"block {k}") for k in range(4)]
    parts += [text(MARGIN, 106, "x, dy and dw of its part stay in registers", "soft")]
    parts += [arrow(x, 116, x, 142) for x in middle]
    parts += [title(166, "The board: a row of slots")]
    parts += [box(MARGIN + part * k, 178, part - 2, 34, f"b{k}", f"sum {k}") for k in range(4)]
    parts += [box(MARGIN - 3, 175, INNER + 4, 40, "frame")]
    parts += [
        note(238, "Each block writes its part of the row's sum,", "and reads the slots until none is empty.")
    ]
    parts += [arrow(x, 268, x, 294) for x in middle]
    total = "sum 0 + sum 1 + sum 2 + sum 3"
    parts += [box(MARGIN, 298, INNER, 30, "card", total)]
    parts += [text(MARGIN, 350, "in each block, in one order: the same bits", "soft")]
    parts += [arrow(x, 360, x, 386) for x in middle]
    parts += [box(MARGIN + part * k, 390, part - 2, 40, f"b{k}", f"dx {k}") for k in range(4)]
    parts += [text(MARGIN, 452, "Then the team takes its next row.", "soft")]
    return drawing(
        468, "A team: four blocks share a row and exchange one number each through the board", *parts
    )


def tiles() -> str:
    parts = [title(30, "N = 64: several rows share a tile")]
    parts += [box(MARGIN, 42 + 18 * row, 110, 16, "b0") for row in range(4)]
    parts += [box(MARGIN - 3, 39, 116, 76, "frame"), text(142, 82, "one block, one tile", "soft")]

    scale = INNER / 4096
    parts += [title(148, "N = 3584: one tile of 4096")]
    parts += [
        box(MARGIN, 160, 3584 * scale, 34, "b0", "row"),
        box(MARGIN + 3584 * scale, 160, 512 * scale, 34, "off", "off"),
    ]
    parts += [box(MARGIN - 3, 157, INNER + 6, 40, "frame")]

    parts += [title(230, "N = 5120: a tile of 4096, one of 1024")]
    parts += [
        box(MARGIN, 242, INNER * 0.8 - 4, 34, "b0", "4096"),
        box(MARGIN + INNER * 0.8 + 2, 242, INNER * 0.2 - 2, 34, "b1", "1024"),
    ]

    parts += [title(310, "N = 7168: seven equal tiles of 1024")]
    seventh = INNER / 7
    parts += [box(MARGIN + seventh * k, 322, seventh - 3, 34, f"b{k % 2}", str(k)) for k in range(7)]
    parts += [text(MARGIN, 378, "added lane by lane, then across lanes", "soft")]

    parts += [title(412, "N = 32768: a team, a part for each")]
    part = INNER / 4
    parts += [box(MARGIN + part * k, 424, part - 3, 34, f"b{k}", f"block {k}") for k in range(4)]

    parts += [title(492, "N = 200000: chunks, one by one")]
    chunk = INNER / 8
    parts += [
        box(MARGIN + chunk * k, 504, chunk - 3, 34, "b0" if k == 0 else "off", "1 2 3 4 5 6 7 8".split()[k])
        for k in range(8)
    ]
    parts += [
        note(560, "one block reads the row twice: first for its", "sum, then, mostly from L2, for the result")
    ]
    return drawing(598, "How rows of different widths become tiles", *parts)


def rope_pairs() -> str:
    cell = INNER / 8
    parts = [title(30, "Halves: elements i and i + R / 2 (default)")]
    parts += [box(MARGIN + cell * k, 44, cell - 2, 34, f"b{k % 4}", str(k)) for k in range(8)]
    parts += [
        note(102, "Llama, Qwen, Gemma, GPT-NeoX. Of one colour:", "elements that are rotated together.")
    ]
    parts += [title(162, "Pairs: elements 2i and 2i + 1 (interleaved)")]
    parts += [box(MARGIN + cell * k, 176, cell - 2, 34, f"b{k // 2}", str(k)) for k in range(8)]
    parts += [note(234, "GPT-J.")]
    parts += [title(274, "R = 4 of D = 8: the rest stays")]
    parts += [box(MARGIN + cell * k, 288, cell - 2, 34, f"b{k % 2}", str(k)) for k in range(4)]
    parts += [box(MARGIN + cell * k, 288, cell - 2, 34, "off", str(k)) for k in range(4, 8)]
    parts += [title(362, "Columns of cos and sin")]
    parts += [box(MARGIN + cell * k, 376, cell - 2, 34, f"b{k % 4}", str(k)) for k in range(8)]
    parts += [note(434, "R columns: column i belongs to element i,", "in either convention.")]
    parts += [box(MARGIN + cell * k, 470, cell - 2, 34, f"b{k}", str(k)) for k in range(4)]
    parts += [note(528, "R / 2 columns: one for both elements of a pair.")]
    return drawing(
        546, "Which elements of a head are rotated together, and the columns of cos and sin", *parts
    )


def drawings() -> dict[str, str]:
    """Every picture by the name of its file."""
    return {
        "two-kernels.svg": two_kernels(),
        "dx-beside-dw.svg": dx_beside_dw(),
        "teams.svg": teams(),
        "tiles.svg": tiles(),
        "rope-pairs.svg": rope_pairs(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in drawings().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")
