# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Puts measured figures into README.md and bench/results/README.md, so that none of them is typed by hand."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from bench import report
from bench.provenance import ROOT
from bench.shapes import OPS


def result_file(long_list: str) -> Callable[[str], Path]:
    """A parser of the path of a result whose records stand in the list of this name."""

    def parse(text: str) -> Path:
        path = Path(text)
        try:
            result = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"expected a result in JSON, got {text}: {error}") from None
        if not isinstance(result, dict) or long_list not in result:
            raise argparse.ArgumentTypeError(f"expected a result with {long_list}, got {text}")
        if not path.resolve().is_relative_to(ROOT):  # README.md links to the plots beside it
            raise argparse.ArgumentTypeError(f"expected a file under {ROOT}, got {text}")
        return path

    return parse


def refresh(readme: Path, section: str, text: str) -> None:
    """Replaces what stands between the lines `<!-- SECTION:begin -->` and `<!-- SECTION:end -->`."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    old = readme.read_text()
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{readme}: expected the lines {begin} and {end} once each, in this order")
    before, rest = old.split(begin)
    after = rest.split(end)[1]
    readme.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def refresh_results(paths: list[Path]) -> None:
    """Puts a line about each of these results, the first one and all grids into README.md, and every table and picture
    into bench/results/README.md."""
    results = {path: json.loads(path.read_text()) for path in paths}

    def sections(shown: list[Path], folder: Path, is_brief: bool) -> list[str]:
        found = []
        for path in shown:
            names = [name for op in OPS for name in (op, f"{op}-map")]
            images = {name: path.with_name(f"{path.stem}-{name}.png").resolve() for name in names}
            links = {name: os.path.relpath(image, folder) for name, image in images.items() if image.exists()}
            is_folded = bool(found) and not results[path].get("is_grid")
            found.append(report.readme_section(results[path], links, is_folded, is_brief))
        return found

    grids = [path for path in paths if results[path].get("is_grid")]
    tables = [path for path in paths if path not in grids]
    parts = [report.overview([results[path] for path in tables])] if tables else []
    parts += sections(tables[:1] + grids, ROOT, is_brief=True)
    folder = ROOT / "bench/results"
    every = sections(tables + grids, folder, is_brief=False)
    refresh(ROOT / "README.md", "bench", "\n\n".join(parts))
    refresh(folder / "README.md", "bench", "\n\n".join(every))
