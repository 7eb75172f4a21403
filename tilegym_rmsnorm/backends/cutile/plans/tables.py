# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Tuned configs: tables that `python -m tilegym_rmsnorm tune` writes and the selector (select.py) reads.

A table belongs to one GPU model and one toolkit, which its file name says and its content repeats. Its entries are
keyed by op, N, dtype, size class and the weight's dtype, never by M. Op "dx" is a backward without dw. A file that says
anything unexpected is ignored as a whole, with one warning. Neither torch nor cuda.tile is imported.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.limits import STORED, check_config, expect
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, SAME, SERVED_BY, WEIGHTS, Bucket
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class

SCHEMA = 1
SHIPPED_FOLDER = Path(__file__).with_name("tuned")
CACHE_VARIABLE = "TILEGYM_RMSNORM_CACHE_DIR"
OFF = ("0", "off", "none", "")


class Target(NamedTuple):
    """What a table was measured with."""

    gpu: str  # as the driver names it
    architecture: int
    cuda_tile: str
    tileiras: str

    def __str__(self) -> str:
        return f"{self.gpu} with cuda-tile {self.cuda_tile} and tileiras {self.tileiras}"


class Timing(NamedTuple):
    """Why an entry is there: microseconds at M rows, by the config that rules.py gives and by the entry's."""

    m: int
    us_rules: float
    us: float


class Entry(NamedTuple):
    config: Config
    timings: tuple[Timing, ...]


Table = dict[Bucket, Entry]


def tables_of(target: Target | None) -> dict[Path, Table]:
    """The tables that serve a GPU, the one that counts most first, by their files, which need not exist. target: None
    where no table can."""
    if target is None:
        return {}
    folders = [folder for folder in (user_folder(), SHIPPED_FOLDER) if folder is not None]
    return {table_path(folder, target): table_in(folder, target) for folder in folders}


def shipped_for(bucket: Bucket) -> list[Config]:
    """What the tables that ship choose for a bucket's rows on any GPU, with any toolkit, and for any dtype of that
    size: what tuning tries before all else. For dx that is also what they choose for dx with dw."""
    ops = SERVED_BY[bucket.op]
    found = []
    for path in sorted(SHIPPED_FOLDER.glob("*.json")):
        for item in json.loads(path.read_text(encoding="utf-8"))["entries"]:  # that they are fit is tested
            is_alike = ITEMSIZE[item["dtype"]] == ITEMSIZE[bucket.dtype]
            if is_alike and item["op"] in ops and (item["n"], item["size"]) == (bucket.n, bucket.size):
                found.append(Config(**item["config"]))
    return list(dict.fromkeys(found))


def describe(target: Target | None) -> str:
    """One line for people: what chooses the configs on this GPU, first the tables that exist, last the rules."""
    found = [f"{len(table)} in {path}" for path, table in tables_of(target).items() if table]
    notes = (
        []
        if user_folder()
        else [f"the user's cache is off ({CACHE_VARIABLE}, no home folder, or no platformdirs)"]
    )
    if not found:
        shipped = ", ".join(map(str, sorted(shipped_targets())))
        wanted = "" if target is None else f" for {target}"
        notes.insert(
            0,
            f"no table{wanted}; those that ship are for {shipped}. `python -m tilegym_rmsnorm tune` makes one",
        )
    return "; ".join([", then ".join([*found, "the rules of rules.py"]), *notes])


def shipped_targets() -> list[Target]:
    """What the tables that ship are for."""
    tables = [json.loads(path.read_text(encoding="utf-8")) for path in SHIPPED_FOLDER.glob("*.json")]
    return [Target(*(table[name] for name in Target._fields)) for table in tables]


def user_folder() -> Path | None:
    """Where the user's tables are: TILEGYM_RMSNORM_CACHE_DIR, or the platform's folder for caches; None if off.

    None too without platformdirs, which pip installs along with this package; and, with one warning, where no home
    folder is known: HOME is unset and the user's number has no name, as in many containers, or a "~name" is nobody's.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named is None:
        try:
            import platformdirs
        except ImportError:
            return None
        try:
            folder = platformdirs.user_cache_dir("tilegym_rmsnorm", appauthor=False)
        except (RuntimeError, KeyError, OSError) as error:  # by its release, and by the platform
            _warn_homeless(f"{type(error).__name__}: {error}")
            return None
        if not os.path.isabs(folder):  # of older releases: "~" itself, which would be a folder of that name
            _warn_homeless(f"expected an absolute folder for caches, got {folder!r}")
            return None
    elif named.strip().lower() in OFF:
        return None
    else:
        folder = os.path.expanduser(named)
        if folder.startswith("~"):
            _warn_homeless(f"{CACHE_VARIABLE}: expected a user that exists, got {named!r}")
            return None
    return Path(folder)


@functools.cache
def _warn_homeless(reason: str) -> None:
    warnings.warn(
        f"no home folder is known, so tuned configs of the user's are neither read nor kept: {reason}. "
        f'Set {CACHE_VARIABLE} to a folder, or to "off", which says nothing.',
        stacklevel=2,
    )


def table_path(folder: Path, target: Target) -> Path:
    name = f"{target.gpu} cuda-tile {target.cuda_tile} tileiras {target.tileiras}"
    return folder / (re.sub(r"[^a-z0-9.]+", "-", name.lower()) + ".json")


@functools.cache
def table_in(folder: Path, target: Target) -> Table:
    """The table for `target` in a folder, read once in a process; empty if there is none, or none that is fit."""
    path = table_path(folder, target)
    try:
        return _read(path, target)
    except OSError as error:
        return _ignored(path, error)


def _read(path: Path, target: Target) -> Table:
    """The table in a file, empty if there is none, or none that is fit. Raises OSError if it cannot be read."""
    try:
        return parse(path.read_text(encoding="utf-8"), target)
    except (FileNotFoundError, NotADirectoryError):  # the latter for a HOME of /dev/null
        return {}
    except (ValueError, RecursionError) as error:
        return _ignored(path, error)


def _ignored(path: Path, error: Exception) -> Table:
    warnings.warn(
        f"the tuned configs in {path} are ignored: {error}. Delete the file, or run "
        "`python -m tilegym_rmsnorm tune`, which writes it anew.",
        stacklevel=3,
    )
    return {}


def parse(text: str, target: Target) -> Table:
    """The entries of a table's JSON. Raises ValueError on the first thing that is not as `render` writes it."""
    data = json.loads(text)
    expect(isinstance(data, dict), "table", "an object", data)
    expect(data.get("schema") == SCHEMA, "schema", SCHEMA, data.get("schema"))
    found = {name: data.get(name) for name in Target._fields}
    expect(found == target._asdict(), "a table for", target._asdict(), found)
    expect(isinstance(data.get("entries"), list), "entries", "a list", data.get("entries"))
    table: Table = {}
    for number, item in enumerate(data["entries"]):
        try:
            bucket, entry = _parse_entry(item, target.architecture)
            expect(bucket not in table, "bucket", "each once", bucket)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"entry {number}: {error}") from error
        table[bucket] = entry
    return table


def render(target: Target, table: Table) -> str:
    """A table as JSON, an entry a line."""
    entries = [
        {
            **{name: value for name, value in bucket._asdict().items() if (name, value) != ("weight", SAME)},
            "config": {field.name: getattr(entry.config, field.name) for field in STORED},
            "timings": [timing._asdict() for timing in entry.timings],
        }
        for bucket, entry in sorted(table.items())
    ]
    head = json.dumps({"schema": SCHEMA, **target._asdict()}, indent=1).removesuffix("\n}")
    return head + ',\n "entries": [' + ",".join(f"\n  {json.dumps(entry)}" for entry in entries) + "\n ]\n}\n"


def update(folder: Path, target: Target, changes: Table) -> Path:
    """Put entries into the table in `folder` and leave the others; returns its path.

    Processes that write at the same time wait for each other; one that reads sees the old table or the new one.
    """
    from filelock import FileLock  # comes with torch; needed by nobody who only reads

    folder.mkdir(parents=True, exist_ok=True)
    path = table_path(folder, target)
    with FileLock(path.with_suffix(".lock")):
        text = render(target, _read(path, target) | changes)
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


def _parse_entry(item: Any, architecture: int) -> tuple[Bucket, Entry]:
    expect(isinstance(item, dict), "entry", "an object", item)
    item = {"weight": SAME, **item}
    keys = {*Bucket._fields, "config", "timings"}
    expect(set(item) == keys, "keys", sorted(keys), sorted(item))
    bucket = Bucket(*(item[name] for name in Bucket._fields))
    expect(bucket.op in SERVED_BY, "op", tuple(SERVED_BY), bucket.op)
    expect(type(bucket.n) is int and bucket.n > 0, "n", "a positive whole number", bucket.n)
    expect(bucket.dtype in ITEMSIZE, "dtype", tuple(ITEMSIZE), bucket.dtype)
    expect(bucket.size in SIZES, "size", SIZES, bucket.size)
    weights = WEIGHTS if ITEMSIZE[bucket.dtype] == 2 else (SAME,)
    expect(bucket.weight in weights, "weight", weights, bucket.weight)
    has_rows = bool(rows_of_class(bucket.size, bucket.n))
    expect(has_rows, "size", f"a class that some number of rows of {bucket.n} is in", bucket.size)
    timings = tuple(Timing(**timing) for timing in item["timings"])
    numbers = [number for timing in timings for number in timing]
    is_number = all(type(number) in (int, float) and 0 < number <= sys.float_info.max for number in numbers)
    expect(is_number, "timings", "positive numbers", numbers)
    reason = "; ".join(f"{t.us:.1f} us instead of {t.us_rules:.1f} at {t.m} x {bucket.n}" for t in timings)
    config = Config(**item["config"], reason=f"tuned: {reason}")
    check_config(config, bucket, architecture)
    return bucket, Entry(config, timings)
