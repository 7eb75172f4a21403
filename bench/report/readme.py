# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Puts measured figures into pages, so that none of them is typed by hand: those of many results into README.md,
docs/performance.md and bench/results/README.md, all of one result into a page beside it. scripts/docs_figures.py does
it for what is kept.

A section of a page is what stands between its markers: `<!-- NAME:begin -->` and `<!-- NAME:end -->`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.measure.provenance import ROOT, kept_in
from bench.measure.shapes import BATCHES, OPS, Result, kind_of, shape_of
from bench.providers.ours import PDL
from bench.report import block, compare, levels, tables, widths
from bench.report.text import figure_text, table_text

Results = dict[Path, Result]
PAGE, INDEX, TRAINING = "docs/performance.md", "bench/results/README.md", "docs/training.md"
PICTURE = "bench/results/overview.png"  # of README.md
DTYPES = ("bfloat16", "float16", "float32")  # in the order of the pages
HOST_PROVIDERS = ("cutile", "F.rms_norm", "torch.compile")
OPS_SHOWN = ("backward", "forward")
KINDS_SAID = {
    "models": "shapes of models",
    "block": "ops of a transformer block",
    "grid": "over rows and columns",
    "widths": "drawn widths",
}
KINDS = tuple(KINDS_SAID)  # in the order of the pages


def refresh(page: Path, section: str, text: str) -> None:
    """Replaces what stands between the lines `<!-- SECTION:begin -->` and `<!-- SECTION:end -->`."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    old = page.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{page}: expected the lines {begin} and {end} once each, in this order")
    before, rest = old.split(begin)
    after = rest.split(end)[1]
    shown = f"\n{text}\n\n" if text else ""
    page.write_text(f"{before}{begin}\n{shown}{end}{after}")


def refresh_results(paths: Iterable[Path]) -> None:
    """Puts one table and the picture of these results into README.md, their means into docs/performance.md, the list of
    their files into bench/results/README.md, and every table and map of each into the page beside it."""
    from bench.report import overview  # which needs matplotlib, as one_launch_or_two does not

    results = load(paths)
    for section, text in page_sections(results).items():
        refresh(ROOT / PAGE, section, text)
    if (shown := overview.result_shown(results.values())) is not None:
        overview.plot(shown, ROOT / PICTURE)
    refresh(ROOT / INDEX, "bench", index(results))
    refresh(ROOT / "README.md", "bench", readme_section(results))
    for path, text in result_pages(results).items():
        path.write_text(text)


def refresh_training(paths: Iterable[Path]) -> None:
    """Puts results of bench.train into README.md and docs/training.md, and draws their loss curves."""
    from bench.report import curves, device_time, training  # they need matplotlib, one_launch_or_two does not

    results = load(paths)
    for path, result in results.items():
        if curves.noise_of(result) is not None:
            curves.plot(result, training.title(result), path.with_suffix(".png"))
    for folder in sorted({path.parent for path in results}):
        alone = [
            each for path, each in results.items() if path.parent == folder and each["fsdp"] * each["tp"] == 1
        ]
        if alone:
            device_time.plot(training.in_order(alone), folder / "train.png")
    images = {path.stem: path.with_suffix(".png") for path in results if path.with_suffix(".png").exists()}

    def link(stem: str) -> str | None:
        return _link(images[stem].resolve(), ROOT / TRAINING) if stem in images else None

    found = list(results.values())
    refresh(ROOT / "README.md", "train", training.readme_section(found))
    refresh(ROOT / TRAINING, "train", training.page_section(found, link))


def refresh_study(
    page: Path, section: str, results: Path, ending: str, text_of: Callable[[Result], str]
) -> int:
    """Puts the newest kept result of each GPU whose file's name has this ending into a page; how many."""
    kept = newest_by_gpu(results, ending)
    refresh(page, section, "\n\n".join(map(text_of, kept)))
    return len(kept)


def kept_results(folder: Path) -> list[Path]:
    """The newest result of each dtype and GPU in `folder`/GPU/, in the order of KINDS."""
    newest: dict[tuple[int, int, str], tuple[str, Path]] = {}
    for path in sorted(folder.glob("*/*.json")):
        result = json.loads(path.read_text())
        if not result.get("records") or result["gpu"] is None:
            continue
        dtype = DTYPES.index(result["records"][0]["dtype"])
        key = KINDS.index(kind_of(result)), dtype, path.parent.name
        newest[key] = max(newest.get(key, ("", path)), (result["date"], path))
    return [path for _, (_, path) in sorted(newest.items())]


def newest_by_gpu(results: Path, ending: str) -> list[Result]:
    """The newest kept result of each GPU model whose file's name has this ending, in the order of their folders."""
    newest: dict[str, Result] = {}
    for _, result in kept_in(results, f"*/*{ending}"):
        newest[result["gpu"]] = max(result, newest.get(result["gpu"], result), key=lambda each: each["date"])
    return list(newest.values())


def load(paths: Iterable[Path]) -> Results:
    return {path: json.loads(path.read_text()) for path in paths}


def readme_section(results: Results) -> str:
    """The one table of README.md, and what it was measured with."""
    shown = [each for kind in ("models", "block") for each in _of_kind(results, kind)]
    libraries = ("torch", "triton", "cuda-tile", "quack-kernels", "liger-kernel", "tilegym")
    found = [f"tileiras {version}" for version in dict.fromkeys(each["tileiras"] for each in shown)]
    for name in libraries:
        versions = dict.fromkeys(each["versions"].get(name) for each in shown)
        found += [f"{name} {version}" for version in versions if version]
    days = sorted({each["date"][:10] for each in shown})
    measured = f"Measured from {days[0]} to {days[-1]}" if days[1:] else f"Measured on {days[0]}"
    return f"{tables.overview(shown, sizes=(True,))}\n\n{measured}, with {', '.join(found)}."


def page_sections(results: Results) -> dict[str, str]:
    """The sections of docs/performance.md by their names."""
    models, grids = _of_kind(results, "models"), _of_kind(results, "grid")
    return {
        "overview": tables.overview(models, sizes=(False, True)),
        "behind": behind_table(models + grids),
        "option": tables.overview([without_option(each) for each in models]),
        "host": host_table([each for each in models if _dtype(each) == DTYPES[0]]),
        "block": block.overview(_of_kind(results, "block")),
        "bench": links_table(results),
    }


def result_pages(results: Results) -> dict[Path, str]:
    """The page of each result, which lies beside it."""
    pages = {}
    for path, result in results.items():
        page, kind = path.with_suffix(".md"), kind_of(result)
        about = f"[Performance]({_link(ROOT / PAGE, page.resolve())}) says how it was measured, and what a ratio is."
        records = f"[{path.name}]({path.name}) has all records."
        title = f"# {result['gpu']}, {_dtype(result)}, {KINDS_SAID[kind]}"
        parts = [title, f"{about} {records}", tables.said_above(result)]
        if kind == "block":
            parts += block.page_parts(result)
        elif kind == "widths":
            parts += [f"The seed that drew the widths is {result['widths']}.", widths.table(result)]
        else:
            names = [name for op in OPS for name in (op, f"{op}-map")]
            images = {name: f"{path.stem}-{name}.png" for name in names}
            there = {name: image for name, image in images.items() if path.with_name(image).exists()}
            parts += tables.page_parts(result, there)
        if table := levels.table(result):
            parts += tables.folded(
                "Levels of reproducibility: device time over that of the backend without", [table]
            )
        pages[page] = "\n\n".join(parts) + "\n"
    return pages


def index(results: Results) -> str:
    """A table of the pages of these results, with what each was measured of and with."""
    rows = []
    for path, result in results.items():
        link = f"[{path.stem}]({_link(path.with_suffix('.md').resolve(), ROOT / INDEX)})"
        what = KINDS_SAID[kind_of(result)]
        rows.append([link, result["gpu"], _dtype(result), what, result["commit"][:12], result["date"][:10]])
    headers = ["result", "GPU", "dtype", "shapes", "commit", "date"]
    return table_text(rows, headers, left=range(6))


def links_table(results: Results) -> str:
    """Links to the pages of these results, a column for each GPU."""
    gpus = list(dict.fromkeys(each["gpu"] for each in results.values()))
    by_row: dict[tuple[str, str], dict[str, str]] = {}
    for path, result in results.items():
        link = f"[{result['date'][:10]}]({_link(path.with_suffix('.md').resolve(), ROOT / PAGE)})"
        by_row.setdefault((KINDS_SAID[kind_of(result)], _dtype(result)), {})[result["gpu"]] = link
    rows = [[*row, *(links.get(gpu, "") for gpu in gpus)] for row, links in by_row.items()]
    return table_text(rows, ["shapes", "dtype", *gpus], left=range(2 + len(gpus)))


def behind_table(results: list[Result]) -> str:
    """Count cells with a faster peer; show the one where cutile is furthest behind."""
    rows = []
    for result in results:
        row = [_name(result)]
        for op in OPS_SHOWN:
            cells = compare.compare(result, op)
            behind = sorted((each for each in cells if each.ratio < 1.0), key=lambda each: each.ratio)
            row.append(f"{len(behind)} of {len(cells)}" if cells else "")
            worst = [f"{each.ratio:.3f} at {each.shape}, {each.peer['provider']}" for each in behind[:1]]
            row += worst or [""]
        rows.append(row)
    headers = [f"{op}: {what}" for op in OPS_SHOWN for what in ("a peer is faster", "lowest ratio")]
    return table_text(rows, ["GPU, dtype", *headers], left=(0, 2, 4))


def without_option(result: Result) -> Result:
    """The result, had torch.compile not been given Inductor's option PDL."""
    setting = f"{PDL.rpartition('.')[2]}=False"
    records = []
    for record in result["records"]:
        us = (record.get("tried_us") or {}).get(setting)
        is_timed = record["provider"].startswith("torch.compile") and isinstance(us, float)
        records.append(record | {"us": us} if is_timed else record)
    return result | {"records": records}


def host_table(results: list[Result]) -> str:
    """Host microseconds of one eager call of each op, at shapes that the GPU ends before the host."""
    columns = [(op, name) for op in reversed(OPS_SHOWN) for name in HOST_PROVIDERS]
    rows = []
    for result in results:
        found = {(each["op"], shape_of(each), each["provider"]): each for each in result["records"]}
        for shape in BATCHES:
            cells = [found.get((op, shape, name), {}).get("host_us") for op, name in columns]
            shown = [figure_text(us, ".0f") for us in cells]
            rows.append([_name(result), "{} x {}".format(*shape), *shown])
    headers = [f"{op}: {name}" for op, name in columns]
    return table_text(rows, ["GPU, dtype", "rows x cols", *headers], left=(0, 1))


def _of_kind(results: Results, kind: str) -> list[Result]:
    return [each for each in results.values() if kind_of(each) == kind]


def _name(result: Result) -> str:
    return f"{result['gpu']}, {_dtype(result)}{', grid' if kind_of(result) == 'grid' else ''}"


def _dtype(result: Result) -> str:
    return result["records"][0]["dtype"]


def _link(target: Path, page: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()
