# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Writes a result with its pictures, also one of several runs.

python -m bench.report.join RESULT.json OTHER.json...    adds to RESULT the cells that it lacks, or that failed
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports that would fail
    from bench import require

    require()

import argparse
import json
import sys
from pathlib import Path

from bench.measure.processes import differences, join, why_apart
from bench.measure.shapes import Result
from bench.report import compare, levels, tables
from bench.report.plots import plot_result
from tilegym_rmsnorm.commands import options


def write(result: Result, path: Path) -> dict[str, Path]:
    """The result as PATH, and its CSV and pictures beside it; the paths of these by op."""
    tables.write_json(result, path)
    tables.write_csv(result, path.with_suffix(".csv"))
    return plot_result(result, path.with_suffix(""))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.report.join",
        description="Adds to a result the cells that it lacks, or that failed in it, of others of the same GPU.",
    )
    parser.add_argument("result", type=options.path, metavar="RESULT.json")
    parser.add_argument("other", type=options.path, nargs="+", metavar="OTHER.json")
    arguments = parser.parse_args(argv)
    result = json.loads(arguments.result.read_text())
    for path in arguments.other:
        other = json.loads(path.read_text())
        if reason := why_apart(result, other):
            parser.error(f"{arguments.result} and {path} differ in {reason}")
        print(f"{path}: added {', '.join(join(result, other)) or 'nothing'}")
    write(result, arguments.result)
    print("\n".join([*differences(result), "", compare.summary(result), *levels.summary(result)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
