# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results of several processes as one: of providers that need a process of their own, or that ended one.

    python -m bench.processes RESULT.json OTHER.json...     adds to RESULT the cells that it lacks, or that failed

Each process has its own copy ceiling, to which its records' copy_fraction refers; `processes` of the result names them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import compare, report
from bench.cell import failed_record
from bench.gate import cell_of
from bench.peers import ALONE
from bench.plots import plot_result
from bench.provenance import ROOT
from bench.shapes import Shape

Result = dict[str, Any]
SAME = ("gpu", "sms", "driver", "cuda", "tileiras")  # of two results that may be joined


def measure_apart(
    providers: Sequence[str],
    shapes: Sequence[Shape],
    dtype: str,
    ops: Sequence[str],
    folder: Path,
    options: Sequence[str] = (),
) -> Result:
    """What a process of their own measures of these providers; where it dies, records that say so."""
    sizes = ",".join(f"{rows}x{cols}" for rows, cols in shapes)
    command = [sys.executable, "-m", "bench.run", "--provider", ",".join(providers), "--shapes", sizes]
    command += ["--dtype", dtype, "--op", ",".join(ops), "--out", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = sorted(folder.glob(f"*-{dtype}.json"))
    result = json.loads(found[0].read_text()) if found else {"copy_gb_per_s": None, "records": []}
    have = {(each["provider"], each["op"], each["rows"], each["cols"]) for each in result["records"]}
    measured = {name for name, *_ in have}
    reasons = result.get("unavailable", {})
    error = f"its process ended with status {done.returncode}"
    result["records"] += [
        failed_record(op, shape, dtype, name, reasons.get(name, error))
        for name in providers
        for shape in shapes
        for op in ops
        if done.returncode < 0 or name not in measured  # killed on the way, or never begun
        if (name, op, *shape) not in have
    ]
    return result


def join(result: Result, other: Result, ops: Sequence[str] | None = None) -> list[str]:
    """Adds the other's cells that the result lacks or that failed in it; the names of their providers.

    ops: only these; None means all.
    """
    known = {cell_of(record): record for record in result["records"]}
    new = [
        record
        for record in other["records"]
        if ops is None or record["op"] in ops
        if cell_of(record) not in known or known[cell_of(record)].get("error") and not record.get("error")
    ]
    replaced = {cell_of(record) for record in new}
    result["records"] = [each for each in result["records"] if cell_of(each) not in replaced] + new
    added = list(dict.fromkeys(record["provider"] for record in new))
    parts = [
        part | {"providers": [name for name in part["providers"] if name in added]}
        for part in other.get("processes", [])
    ]
    apart = {name for part in parts for name in part["providers"] if name in ALONE}
    whole = {key: other.get(key) for key in ("copy_gb_per_s", "date", "commit")}
    whole["providers"] = [name for name in added if name not in apart]
    if found := [part for part in (whole, *parts) if part["providers"]]:
        result.setdefault("processes", []).extend(found)
    measured = {record["provider"] for record in result["records"]}
    reasons = result["unavailable"] | other.get("unavailable", {})
    result["unavailable"] = {name: reason for name, reason in reasons.items() if name not in measured}
    return added


def differences(result: Result) -> list[str]:
    """One line for each process of its own: its copy rate beside the result's."""
    own = result["copy_gb_per_s"]
    lines = []
    for process in result.get("processes", []):
        rate = process["copy_gb_per_s"]
        if own is not None and rate is not None:
            names = ", ".join(process["providers"])
            lines.append(
                f"{names}: in a process of its own, device copy {rate:.0f} GB/s ({rate / own - 1:+.1%})"
            )
    return lines


def why_apart(result: Result, other: Result) -> str | None:
    """Why two results cannot be joined."""
    for key in SAME:
        if result.get(key) != other.get(key):
            return f"{key}: {result.get(key)} and {other.get(key)}"
    dtypes = {record["dtype"] for each in (result, other) for record in each["records"]}
    return None if len(dtypes) == 1 else f"dtype: {', '.join(sorted(dtypes))}"


def write(result: Result, path: Path) -> dict[str, Path]:
    """The result as PATH, and its CSV and pictures beside it; the paths of these by op."""
    report.write_json(result, path)
    report.write_csv(result, path.with_suffix(".csv"))
    return plot_result(result, path.with_suffix(""))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.processes",
        description="Adds to a result the cells that it lacks, or that failed in it, of others of the same GPU.",
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json")
    parser.add_argument("other", type=Path, nargs="+", metavar="OTHER.json")
    parser.add_argument(
        "--op", type=lambda text: text.split(","), help="only these ops of the others: OP,..."
    )
    arguments = parser.parse_args(argv)
    result = json.loads(arguments.result.read_text())
    for path in arguments.other:
        other = json.loads(path.read_text())
        if reason := why_apart(result, other):
            parser.error(f"{arguments.result} and {path} differ in {reason}")
        print(f"{path}: added {', '.join(join(result, other, arguments.op)) or 'nothing'}")
    write(result, arguments.result)
    print("\n".join([*differences(result), "", compare.summary(result)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
