# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The pictures of results: who is who, what stands above and below, how large a file is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench_records import make_record, make_result
from matplotlib.figure import Figure
from PIL import Image

from bench.measure.provenance import RESULTS
from bench.providers.peers import ALL_PROVIDERS
from bench.report import overview, pictures, plots, readme
from bench.report.styles import OTHER, STYLES


def make_peered(**changes):
    return make_result(make_record(), make_record(120.0, provider="quack", gb_per_s=1600.0), **changes)


@pytest.fixture
def figures(monkeypatch):
    """Record figures."""
    found, save = [], pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: (found.append(figure), save(figure, path)))
    return found


def test_every_provider_has_a_style_of_its_own():
    assert set(ALL_PROVIDERS) < set(STYLES)
    for kind in zip(*STYLES.values(), OTHER, strict=True):
        assert len(set(kind)) == len(STYLES) + 1, kind


def test_pictures_say_of_which_gpu_they_are_and_cut_nothing_off(figures, tmp_path):
    """The largest result of plain norms has most providers and the longest footer."""
    kept = [path for path in RESULTS.glob("*/*.json") if not path.stem.endswith(("-block", "-widths"))]
    result = json.loads(max(kept, key=lambda path: path.stat().st_size).read_text())
    records = [each for each in result["records"] if each["op"] == "backward"]
    paths = plots.plot_result({**result, "records": records}, tmp_path / "a")
    assert list(paths) == ["backward", "backward-map"] and len(figures) == 2
    for figure, path in zip(figures, paths.values(), strict=True):
        assert result["gpu"] in figure.get_suptitle()
        for box in (part.get_window_extent() for part in figure.texts):
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width and 0 <= box.y0 < box.y1 <= figure.bbox.height
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size <= pictures.MOST_BYTES


@pytest.mark.parametrize("is_grid", [False, True])
def test_without_a_gpu_there_are_no_pictures(is_grid, figures, tmp_path):
    """One was a dark red 0.00: kernels' interpreters against PyTorch."""
    result = make_peered(gpu=None, copy_gb_per_s=None, is_grid=is_grid, note="Not GPU figures.")
    assert plots.plot_result(result, tmp_path / "a") == {} and not figures


def test_shapes_have_no_line_through_them(figures, tmp_path):
    shapes = ((16, 4096), (131072, 64), (4096, 1024))
    records = [
        make_record(rows=rows, cols=cols, provider=provider)
        for rows, cols in shapes
        for provider in ("cutile", "quack", "a new one")
    ]
    plots.plot_result(make_result(*records), tmp_path / "a")
    axes = figures[0].axes[0]
    (copy,) = axes.lines
    assert copy.get_label() == "device copy"
    assert len(axes.patches) == len(shapes), "a bar of ours for each"
    names = {text.get_text() for text in axes.get_legend().get_texts()}
    assert names == {"cutile", "quack", "a new one", "device copy"}
    assert len({text.get_text() for text in axes.texts}) == 3, (
        "each shape is of another group, which has a name"
    )


def test_a_saved_picture_keeps_the_colours_of_its_cells(tmp_path):
    """Pillow's own palettes made light greens pink."""
    figure = Figure(figsize=(4, 4))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(np.arange(16).reshape(4, 4), cmap="Greens")
    for row, col in np.ndindex(4, 4):
        axes.text(col, row, "12%", ha="center", color="white" if row > 1 else "black")
    figure.savefig(tmp_path / "plain.png", dpi=pictures.DPI)
    pictures.save(figure, tmp_path / "small.png")
    plain, small = (Image.open(tmp_path / f"{name}.png").convert("RGB") for name in ("plain", "small"))
    for at in np.ndindex(4, 4):
        corner = tuple(110 * each + 30 for each in at)
        assert small.getpixel(corner) == plain.getpixel(corner)
    assert (tmp_path / "small.png").stat().st_size < (tmp_path / "plain.png").stat().st_size


def test_a_picture_of_too_many_colours_gets_fewer(tmp_path):
    figure = Figure(figsize=(4, 4))
    noise = np.random.default_rng(0).random((360, 360))
    figure.add_axes((0, 0, 1, 1)).imshow(noise, cmap="viridis", interpolation="nearest")
    pictures.save(figure, tmp_path / "a.png")
    assert 0 < (tmp_path / "a.png").stat().st_size <= pictures.MOST_BYTES


def test_the_picture_of_readme_shows_the_fastest_of_several_kernels(figures, tmp_path):
    result = overview.result_shown(readme.load(readme.kept_results(RESULTS)).values())
    overview.plot(result, tmp_path / "a.png")
    (figure,) = figures
    assert result["gpu"] in figure.get_suptitle()
    rates = {
        (each["rows"], each["cols"], each["provider"]): each["gb_per_s"]
        for each in result["records"]
        if each["op"] == "backward"
    }
    shown = {group.get_label(): [bar.get_height() for bar in group] for group in figure.axes[0].containers}
    liger = next(heights for label, heights in shown.items() if "Liger" in label)
    for number, shape in enumerate(overview.MODELS):
        assert shown["this package"][number] == rates[(*shape, "cutile")]
        kernels = [rates[(*shape, f"liger.{name}")] for name in ("cutile", "cute", "triton")]
        assert liger[number] == max(each for each in kernels if each is not None)
