# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Puts measured figures into README.md and bench/results/README.md, so that none of them is typed by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from bench.provenance import ROOT


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
