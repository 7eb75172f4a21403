# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The files that records are in: those that ship in plans/, one per architecture, and the user's, which
`python -m tilegym_rmsnorm tune` writes, one per GPU model and toolkit.

A user's file that says anything unexpected is ignored as a whole, with one warning. Records of the form "rope", which
`tune` had once, are ignored by themselves.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, Bucket, Target
from tilegym_rmsnorm.backends.cutile.plans.records import (
    SCHEMA,
    SERVED_BY,
    Record,
    Records,
    Tables,
    nearest_forms,
    parse,
    render,
)
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant, expect

SHIPPED_FOLDER = Path(__file__).parents[1] / "plans"


def tables_of(architecture: int, target: Target | None, folder: Path | None) -> Tables:
    """Return the records that decide on a GPU: the user's in `folder` for its model and toolkit, those that ship for
    its model, and rules by its architecture."""
    if target is None:
        return Tables(rules=_rules(architecture))
    shipped = _of_gpu(architecture, target.gpu)
    return Tables((table_in(folder, target), shipped) if folder else (shipped,), _rules(architecture))


@functools.cache
def _of_gpu(architecture: int, gpu: str) -> Records:
    return Records(record for record in shipped_records(architecture) if gpu in record.gpus)


@functools.cache
def _rules(architecture: int) -> tuple[Records, ...]:
    own = Records(record for record in shipped_records(architecture) if not record.gpus)
    return Records(shipped_records(None)), own


@functools.cache
def shipped_records(architecture: int | None) -> tuple[Record, ...]:
    """The records that ship for an architecture, or (None) for all of them."""
    path = SHIPPED_FOLDER / ("any.json" if architecture is None else f"sm_{architecture}.json")
    records = json.loads(path.read_text(encoding="utf-8"))["records"] if path.exists() else ()
    return tuple(parse(item, architecture or 0) for item in records)


def shipped_for(bucket: Bucket) -> list[Variant]:
    """Return the variants that tuning tries first: those that records which ship have for a bucket's rows, of any GPU
    and any dtype of that size. For dx also those for dx with dw. For a form first those of the form, then those of the
    nearest others, plain rows last."""
    found: list[Variant] = []
    for form in nearest_forms(bucket.form):
        for path in sorted(SHIPPED_FOLDER.glob("sm_*.json")):
            for record in shipped_records(int(path.stem.removeprefix("sm_"))):
                is_alike = ITEMSIZE[bucket.dtype] in {ITEMSIZE[dtype] for dtype in record.dtypes}
                is_op = not set(record.ops).isdisjoint(SERVED_BY[bucket.op])
                is_for = is_op and bucket.size in record.sizes and form in record.forms
                if record.first <= bucket.n <= record.last and is_alike and is_for:
                    found += filter(None, [record.variant(bucket.n)])
    return list(dict.fromkeys(found))


def describe(target: Target | None, folder: Path | None) -> str:
    """Describe in one line for people how kernels are chosen on this GPU, the first that counts first."""
    found = []
    if target is not None and folder is not None and (count := len(table_in(folder, target))):
        found.append(f"{count} in {table_path(folder, target)}")
    if target is not None and (count := len(_of_gpu(target.architecture, target.gpu))):
        found.append(f"{count} that ship for it")
    text = ", then ".join([*found, "the rules of plans/"])
    if not found:
        wanted = "this GPU" if target is None else str(target)
        text += f"; none are for {wanted} alone: `python -m tilegym_rmsnorm tune` makes some"
    return text


def table_path(folder: Path, target: Target) -> Path:
    name = f"{target.gpu} cuda-tile {target.cuda_tile} tileiras {target.tileiras}"
    return folder / (re.sub(r"[^a-z0-9.]+", "-", name.lower()) + ".json")


@functools.cache
def table_in(folder: Path, target: Target) -> Records:
    """The user's entries for `target`, read once in a process; none if there are none, or none that are fit."""
    path = table_path(folder, target)
    try:
        return Records(_read(path, target))
    except OSError as error:
        return Records(_ignored(path, error))


def _read(path: Path, target: Target) -> list[Record]:
    """The entries in a file, none if there is no file, or none that is fit. Raises OSError if it cannot be read."""
    try:
        return parse_table(path.read_text(encoding="utf-8"), target)
    except (FileNotFoundError, NotADirectoryError):  # the latter for a HOME of /dev/null
        return []
    except (ValueError, RecursionError) as error:
        return _ignored(path, error)


def _ignored(path: Path, error: Exception) -> list[Record]:
    warnings.warn(
        f"the tuned settings in {path} are ignored: {error}. Delete the file, or run "
        "`python -m tilegym_rmsnorm tune`, which writes it anew.",
        stacklevel=3,
    )
    return []


def parse_table(text: str, target: Target) -> list[Record]:
    """The entries of a user's file. Raises ValueError on the first thing that is not as `render_table` writes it."""
    data = json.loads(text)
    expect(isinstance(data, dict), "table", "an object", data)
    expect(data.get("schema") == SCHEMA, "schema", SCHEMA, data.get("schema"))
    found = {name: data.get(name) for name in Target._fields}
    expect(found == target._asdict(), "a table for", target._asdict(), found)
    expect(isinstance(data.get("records"), list), "records", "a list", data.get("records"))
    records = []
    for number, item in enumerate(data["records"]):
        if isinstance(item, dict) and item.get("forms") == ["rope"]:
            _tell_of_rope(target)
            continue
        try:
            records.append(parse(item, target.architecture))
            expect(records[-1].is_entry, "n", "one number", item["n"])
        except (ValueError, TypeError, KeyError, ArithmeticError) as error:
            raise ValueError(f"record {number}: {error}") from error
    return records


@functools.cache
def _tell_of_rope(target: Target) -> None:
    """Warn once in a process: a table is read again where it is updated."""
    warnings.warn(
        f"records of the form rope in the table for {target} are ignored: qk_norm_rope takes the rules' settings. The "
        "other records serve, and the next run of `python -m tilegym_rmsnorm tune` leaves these out.",
        stacklevel=2,
    )


def render_table(target: Target, records: Iterable[Record]) -> str:
    """The text of a user's file, a record a line."""
    head = json.dumps({"schema": SCHEMA, **target._asdict()}, indent=1).removesuffix("\n}")
    return head + ',\n "records": [' + ",".join(f"\n  {render(record)}" for record in records) + "\n ]\n}\n"


def update(folder: Path, target: Target, changes: Iterable[Record]) -> Path:
    """Put entries into the user's file in `folder`, in place of those of the same buckets; returns its path.

    Processes that write at the same time wait for each other; one that reads sees the old file or the new one.
    """
    from filelock import FileLock  # comes with torch; needed by nobody who only reads

    folder.mkdir(parents=True, exist_ok=True)
    path, changes = table_path(folder, target), list(changes)
    changed = {bucket for record in changes for bucket in record.buckets()}
    with FileLock(path.with_suffix(".lock")):
        kept = [record for record in _read(path, target) if not changed.issuperset(record.buckets())]
        text = render_table(target, [*changes, *kept])
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=path.stem, suffix=".tmp")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp's 0o600 would hide a table that is to ship
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        table_in.cache_clear()
    return path
