# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Helpers of the tests of tables: one target, one bucket, one entry, folders of files; and the entries that ship."""

import json
from pathlib import Path
from typing import Any

import planning
import pytest

from tilegym_rmsnorm.backends.cutile.plans import records, select
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket, Device, Target
from tilegym_rmsnorm.backends.cutile.plans.records import Record
from tilegym_rmsnorm.backends.cutile.plans.select import Choice
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder

TARGET = planning.H100
GPU = planning.device(target=TARGET)
BUCKET = Bucket("backward", 4096, "bfloat16", "large")
SHIPPED_FOLDER = tables.SHIPPED_FOLDER  # also where a test has another


def entry_of(bucket: Bucket, variant: Variant, *evidence: dict[str, Any]) -> Record:
    """The entry by which a variant serves a bucket."""
    op, n, dtype, size, weight, form = bucket
    lists = (op,), (dtype,), (weight,), (size,)
    return Record(
        *lists, n, n, variant.kernel, (variant.settings(),), evidence=evidence, forms=(form,), is_entry=True
    )


VARIANT = BackwardRows(width=4096, warps=4, occupancy=1, latency=3)
ENTRY = entry_of(BUCKET, VARIANT, {"m": 16384, "before": 140.0, "us": 130.5})


def choice(bucket: Bucket = BUCKET, facts: Device = GPU) -> Choice:
    """Choose by the user's tables, those that ship, and rules."""
    return select.choose(
        bucket.problem(facts), tables.tables_of(facts.architecture, facts.target, user_folder())
    )


def chosen(bucket: Bucket = BUCKET, facts: Device = GPU) -> Variant:
    return choice(bucket, facts).first


def rule(bucket: Bucket = BUCKET, facts: Device = GPU) -> Variant:
    """Choose by the rules alone."""
    return select.choose(bucket.problem(facts), planning.rules_of(facts.architecture)).first


# Folders of files


def copy_rules(folder: Path, architecture: int = TARGET.architecture) -> None:
    """Put the rules that ship into a folder, and no entry."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (SHIPPED_FOLDER / "any.json", SHIPPED_FOLDER / f"sm_{architecture}.json"):
        if path.exists():
            data = json.loads(path.read_text(encoding="utf-8"))
            data["records"] = [item for item in data["records"] if "gpus" not in item]
            (folder / path.name).write_text(json.dumps(data), encoding="utf-8")


def ship(folder: Path, target: Target, *entries: Record) -> Path:
    """Put entries into the file that ships in a folder, before what it has; returns its path. Its toolkit is the
    target's from then on."""
    path = folder / f"sm_{target.architecture}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data |= {"cuda_tile": target.cuda_tile, "tileiras": target.tileiras}
    own = [json.loads(records.render(entry._replace(gpus=(target.gpu,)))) for entry in entries]
    path.write_text(json.dumps(data | {"records": [*own, *data["records"]]}), encoding="utf-8")
    forget_files()
    return path


def write_with_rope(folder: Path, *entries: Record) -> Path:
    """Write a user's table as an older `tune` may have, with a record of the form "rope" before others; returns its
    path."""
    settings = {"elements": 2048, "heads": 8, "width": 128, "warps": 8, "occupancy": 2, "latency": 5}
    item = {
        **{"ops": ["backward"], "dtypes": ["bfloat16"], "sizes": ["large"], "forms": ["rope"], "n": 128},
        **{"kernel": "backward_rope", "settings": settings},
    }
    path = tables.update(folder, TARGET, entries)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"records": [item, *data["records"]]}))
    forget_files()
    return path


def forget_files() -> None:
    """Files are read once in a process, and by this again."""
    reads = (tables.table_in, tables._of_gpu, tables._rules, tables.shipped_records)
    for read in (*reads, tables._tell_of_rope):
        read.cache_clear()


def entries_that_ship(machine, op: str, dtype: str) -> list[tuple[Bucket, Variant]]:
    """List the buckets and variants of `op` on tensors of `dtype` that ship for this GPU model, in order. Skip the test
    where there are none."""
    target = machine.facts.target
    entries = sorted(serving(target, op, dtype).items())
    if not entries:
        pytest.skip(f"no entries of {op} and {dtype} ship for {target}")
    return entries


def serving(target: Target, op: str, dtype: str) -> dict[Bucket, Variant]:
    """Return the variants of the records that ship for a GPU model, and of the rules that were timed and do not lend,
    for tensors of `dtype`, with those that `dtype` takes from another dtype."""
    found: dict[Bucket, Variant] = {}
    for lender in (dtype, *select.SHARED.get(dtype, ())):
        for record in tables.shipped_records(target.architecture):
            for bucket in record.buckets() if target.gpu in record.gpus or not record.lends else ():
                if (bucket.op, bucket.dtype) == (op, lender):
                    for n in widths_of(record, bucket.size):
                        if variant := record.variant(n):
                            found.setdefault(bucket._replace(dtype=dtype, n=n), variant)
    return found


def widths_of(record: Record, size: str) -> list[int]:
    """Return the width of an entry, or the narrowest and the widest of a range that have rows of a size class, and that
    are multiples of 16 bytes in each dtype, as the range asks."""
    if record.is_entry:
        return [record.first]
    served = [n for n in range(-(-record.first // 8) * 8, record.last + 1, 8) if rows_of_class(size, n)]
    return sorted({served[0], served[-1]}) if served else []
