# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Results of several processes as one: of providers that need a process of their own, or that ended one.

Each process has its own copy ceiling, to which its records' copy_fraction refers; `processes` of the result names them,
by provider and shape.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure.cell import failed_record
from bench.measure.provenance import PACKAGE, ROOT
from bench.measure.shapes import Record, Result, Shape, cell_of, parse_shapes, shape_of
from bench.providers.peers import ALONE

# Providers, and the shapes at which one process measures them.
Group = tuple[tuple[str, ...], tuple[Shape, ...]]
# Of two results that may be joined.
SAME = (
    "gpu",
    "sms",
    "driver",
    "cuda",
    "tileiras",
    "versions",
    "is_grid",
    "is_block",
    "widths",
    "reproducible",
)


class Loss(NamedTuple):
    """Loss of a process's CUDA context, which ended it: by whose kernel, at which shape, with what message."""

    provider: str
    shape: Shape
    text: str


def measure_others(
    groups: Sequence[Group], compiled: Collection[str], ops: Sequence[str], dtype: str, result: Result
) -> None:
    """Adds to the result what a process for each of these groups measures, and one for what those leave that lose their
    CUDA context: a provider fails where it does so, and nobody elsewhere.

    compiled: the providers whose kernels are in the caches by now.
    """
    groups = list(groups)
    while groups:
        names, shapes = groups.pop(0)
        options = () if set(names) <= set(compiled) else ("--warm",)
        with tempfile.TemporaryDirectory() as folder:
            other = measure_apart(names, shapes, dtype, ops, Path(folder), options)
        lost = other.pop("lost", None)
        join(result, other)
        if lost is not None:
            provider, shape, text = lost
            groups = [*left_by(Loss(provider, tuple(shape), text), names, shapes), *groups]


def left_by(loss: Loss, providers: Sequence[str], shapes: Sequence[Shape]) -> list[Group]:
    """List what is still to be measured: at the shape of the loss the others, behind it all."""
    others = tuple(name for name in providers if name != loss.provider)
    behind = tuple(shapes)[shapes.index(loss.shape) + 1 :]
    return [group for group in ((others, (loss.shape,)), (tuple(providers), behind)) if all(group)]


def lost_records(loss: Loss, ops: Sequence[str], dtype: str, records: Sequence[Record]) -> list[Record]:
    """The records of the provider at the shape where it lost the context. records: those of the shapes before."""
    error = f"lost the CUDA context: {loss.text}"
    offered = _offered(loss.provider, ops, records)
    return [failed_record(op, loss.shape, dtype, loss.provider, error) for op in offered]


def _offered(provider: str, ops: Sequence[str], records: Sequence[Record]) -> list[str]:
    """The ops that it has records of; all, where it has none."""
    found = {record["op"] for record in records if record["provider"] == provider}
    return [op for op in ops if op in found or not found]


def measure_apart(
    providers: Sequence[str],
    shapes: Sequence[Shape],
    dtype: str,
    ops: Sequence[str],
    folder: Path,
    options: Sequence[str] = (),
) -> Result:
    """Measure these providers in a process of their own. Where it dies, records say so; where it loses its CUDA
    context, `lost` does, and what it left has none."""
    sizes = shapes_text(shapes)
    command = [sys.executable, "-m", "bench.run", "--provider", ",".join(providers), "--shapes", sizes]
    command += ["--dtype", dtype, "--op", ",".join(ops), "--out", str(folder), "--part", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    found = sorted(folder.glob(f"*-{dtype}.json"))
    result = json.loads(found[0].read_text()) if found else {"copy_gb_per_s": None, "records": []}
    if "lost" in result:
        return result
    records = list(result["records"])
    reached, measured = {shape_of(each) for each in records}, {each["provider"] for each in records}
    reasons = result.get("unavailable", {})
    error = f"its process ended with status {done.returncode}"
    result["records"] += [
        failed_record(op, shape, dtype, name, reasons.get(name, error))
        for name in providers
        for shape in shapes
        for op in _offered(name, ops, records)
        if name not in measured or shape not in reached
    ]
    return result


def shapes_text(shapes: Sequence[Shape]) -> str:
    """Invert `parse_shapes`."""
    return ",".join(f"{rows}x{cols}" for rows, cols in shapes)


def join(result: Result, other: Result) -> list[str]:
    """Adds the other's cells that the result lacks or that failed in it; the names of their providers."""
    known = {cell_of(record): record for record in result["records"]}
    new = [
        record
        for record in other["records"]
        if cell_of(record) not in known or known[cell_of(record)].get("error") and not record.get("error")
    ]
    replaced = {cell_of(record) for record in new}
    result["records"] = [each for each in result["records"] if cell_of(each) not in replaced] + new
    added = list(dict.fromkeys(record["provider"] for record in new))
    parts = [
        part | {"providers": [name for name in part["providers"] if name in added]}
        for part in other.get("processes", [])
    ]
    by_part = [(name, part) for part in parts for name in part["providers"]]
    apart = {(name, shape) for name, part in by_part for shape in _shapes_of(name, part, new)}
    own = [record for record in new if (record["provider"], shape_of(record)) not in apart]
    whole = {key: other.get(key) for key in ("copy_gb_per_s", "date", "commit", "sources", "inductor_timer")}
    whole["providers"] = list(dict.fromkeys(record["provider"] for record in own))
    whole["shapes"] = shapes_text(list(dict.fromkeys(map(shape_of, own))))
    if found := [part for part in (whole, *parts) if part["providers"]]:
        result.setdefault("processes", []).extend(found)
    if new:  # of libraries that this environment lacked
        versions = result.get("versions", {})
        others = {name: each for name, each in other.get("versions", {}).items() if name not in versions}
        result["versions"] = versions | others
    measured = {record["provider"] for record in result["records"]}
    reasons = result["unavailable"] | other.get("unavailable", {})
    result["unavailable"] = {name: reason for name, reason in reasons.items() if name not in measured}
    return added


def _shapes_of(provider: str, part: Record, records: Sequence[Record]) -> list[Shape]:
    """The shapes at which that process measured the provider. Results from before `shapes` do not say them: one that
    never shares a process was there at all, of another both processes may have measured some."""
    if "shapes" in part:
        return list(parse_shapes(part["shapes"]))
    return [shape_of(record) for record in records] if provider in ALONE else []


def differences(result: Result) -> list[str]:
    """One line for each process of its own: its copy rate beside the result's."""
    own = result["copy_gb_per_s"]
    every = {shape_of(record) for record in result["records"]}
    lines = []
    for process in result.get("processes", []):
        rate = process["copy_gb_per_s"]
        if own is not None and rate is not None:
            names = ", ".join(process["providers"])
            shapes = set(parse_shapes(process["shapes"])) if "shapes" in process else every
            names += "" if shapes >= every else f" at {len(shapes)} of {len(every)} shapes"
            copy = f"device copy {rate:.0f} GB/s ({rate / own - 1:+.1%})"
            lines.append(f"{names}: in a process of its own, {copy}")
    return lines


def why_apart(result: Result, other: Result) -> str | None:
    """Why two results cannot be joined. What an old one does not say is no reason."""
    for key in SAME:
        one, two = (_compared(each, key) for each in (result, other))
        if key == "versions":  # of what both had; their own commits say which package it was
            both = (one.keys() & two.keys()) - {PACKAGE}
            one, two = ({name: each[name] for name in sorted(both)} for each in (one, two))
        if one != two:
            return f"{key}: {one} and {two}"
    dtypes = {record["dtype"] for each in (result, other) for record in each["records"]}
    return None if len(dtypes) == 1 else f"dtype: {', '.join(sorted(dtypes))}"


def _compared(result: Result, key: str) -> Any:
    return result.get(
        key, {"versions": {}, "is_grid": False, "is_block": False, "reproducible": "run"}.get(key)
    )
