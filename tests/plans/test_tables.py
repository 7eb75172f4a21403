# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables of tuned configs: which one decides, what is refused, and what writing leaves intact."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from table_cases import BUCKET, ENTRY, MACHINE, TARGET, chosen, without_reason

from tilegym_rmsnorm.backends.cutile.plans import problem, select, tables
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket
from tilegym_rmsnorm.backends.cutile.plans.rules import (
    ARCHITECTURES,
    backward_config,
    beside_float32_config,
    forward_config,
    row_partials_config,
)
from tilegym_rmsnorm.backends.cutile.plans.sizes import MOST_LOSS, SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.tables import Entry, Target
from tilegym_rmsnorm.backends.cutile.runtime import toolchain
from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates


def test_rules_serve_where_no_table_has_an_entry(folders):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n in (64, 1000, 4096, 40000):
            for size in SIZES:
                for op, rule in (("forward", forward_config), ("backward", backward_config)):
                    expected = rule(n, dtype.itemsize, 90, size)
                    assert select.chosen_config(op, MACHINE, n, dtype, size) == expected
                expected = backward_config(n, dtype.itemsize, 90, size, has_dw=False)
                found = select.chosen_config("dx", MACHINE, n, dtype, size)
                assert found == expected and not found.slab


def test_without_dw_no_entry_serves_that_reads_more_for_dw(folders):
    bucket = BUCKET._replace(size="few")
    fused = Config("fused", 4096, 8, 1, 2, rows=64, strip=32, slab=512)
    rows = Config("rows", 4096, 4, 1, 3, short=True)
    strips = Config("strips", 2048, 4, 3, 4, tma=True)
    for config, serves in ((fused, False), (rows, True), (strips, False)):
        tables.update(folders[0], TARGET, {bucket: Entry(config, ())})
        assert without_reason(chosen(bucket)) == config
        found = select.chosen_config("dx", MACHINE, 4096, torch.bfloat16, "few")
        assert (without_reason(found) == config) is serves and not found.slab


def test_a_backward_without_dw_has_entries_of_its_own(folders):
    """Wherever they are, they come before those of backwards with dw, for which they are nothing."""

    def dx_alone(dtype=torch.bfloat16):
        return without_reason(select.chosen_config("dx", MACHINE, 4096, dtype, "large"))

    user, shipped = folders
    alone = BUCKET._replace(op="dx")
    by_tma = Config("tiles", 4096, 8, 1, 2, rows=2, tma=True)
    tables.update(user, TARGET, {BUCKET: ENTRY})
    assert dx_alone() == ENTRY.config
    tables.update(shipped, TARGET, {alone: Entry(by_tma, ())})
    assert dx_alone() == by_tma and dx_alone(torch.float16) == by_tma
    assert without_reason(chosen()) == ENTRY.config
    chunks = Config("chunks", 4096, 4, 2, 4, tma=True)
    tables.update(user, TARGET, {alone: Entry(chunks, ())})
    assert dx_alone() == chunks, "no kernel of a backward with dw"


def test_the_users_table_comes_before_the_shipped_one(folders):
    user, shipped = folders
    other = Entry(Config("rows", 4096, 8, 2, 5), ())
    tables.update(
        shipped, TARGET, {BUCKET: other, BUCKET._replace(n=8192): Entry(Config("rows", 8192, 8, 1, 5), ())}
    )
    assert without_reason(chosen()) == other.config
    tables.update(user, TARGET, {BUCKET: ENTRY})
    assert without_reason(chosen()) == ENTRY.config
    assert chosen(BUCKET._replace(n=8192)).latency == 5, "the shipped table serves what the user's has not"


def test_an_entry_serves_its_own_bucket_only(folders):
    tables.update(folders[0], TARGET, {BUCKET: ENTRY})
    assert "130.5 us instead of 140.0 at 16384 x 4096" in chosen().reason
    for change in ({"n": 4097}, {"n": 4080}, {"dtype": "float32"}, {"size": "few"}, {"size": "small"}):
        bucket = BUCKET._replace(**change)
        itemsize = problem.ITEMSIZE[bucket.dtype]
        assert chosen(bucket) == backward_config(bucket.n, itemsize, 90, bucket.size), change
    assert chosen(BUCKET._replace(op="forward")) == forward_config(4096, 2, 90)


def test_entries_of_a_float32_weight_come_first_and_serve_nothing_else(folders):
    user, shipped = folders
    half, single = torch.bfloat16, torch.float32
    beside = Bucket("backward", 4096, "bfloat16", "large", problem.FLOAT32)
    tuned = Config("rows", 1024, 4, 2, 4, pieces=4, tma=True)
    tables.update(user, TARGET, {BUCKET: ENTRY})
    tables.update(shipped, TARGET, {beside: Entry(tuned, ())})

    def config(dtype, weight_dtype, op="backward", n=4096):
        return without_reason(select.chosen_config(op, MACHINE, n, dtype, "large", weight_dtype))

    for dtype in (half, torch.float16):
        assert config(dtype, single) == config(dtype, single, "dx") == tuned, (
            "the user has none of such a weight"
        )
        assert config(dtype, dtype) == config(dtype, None) == ENTRY.config
    assert config(single, single) == without_reason(backward_config(4096, 4, 90))
    assert json.loads(next(shipped.glob("*.json")).read_text())["entries"][0]["weight"] == "float32"
    assert "weight" not in json.loads(next(user.glob("*.json")).read_text())["entries"][0]


def test_an_entry_does_not_serve_16_bit_rows_beside_a_float32_weight_that_have_rules(folders):
    """It was timed beside a weight of x's dtype: on an H200 8192x7168 took 151.5 us so, by the rules 100.3."""
    half, single = torch.bfloat16, torch.float32
    entries = {"forward": Config("rows", 8192, 8, 2, 4), "backward": Config("rows", 8192, 8, 1, 8)}
    for op, config in entries.items():
        for dtype in ("bfloat16", "float32"):
            tables.update(folders[0], TARGET, {Bucket(op, 7168, dtype, "large"): Entry(config, ())})

        def kernel(dtype, weight_dtype=None, op=op, n=7168):
            return without_reason(select.chosen_config(op, MACHINE, n, dtype, "large", weight_dtype))

        assert kernel(half) == kernel(half, half) == config != kernel(half, single)
        assert kernel(torch.float16, single) == kernel(half, single)
        assert kernel(single, single) == kernel(single) == config
        for n in (1000, 1024):  # have no such rules
            assert kernel(half, single, n=n) == kernel(half, n=n)


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H200"}, {"cuda_tile": "1.8.0"}, {"tileiras": "13.5.37"}])
def test_tables_of_other_gpus_and_toolkits_neither_count_nor_are_touched(folders, change):
    user, _ = folders
    path = tables.update(user, TARGET._replace(**change), {BUCKET: ENTRY})
    before = path.read_bytes()
    assert chosen() == backward_config(4096, 2, 90)
    tables.update(user, TARGET, {BUCKET: Entry(Config("rows", 4096, 8, 2, 9), ())})
    assert path.read_bytes() == before
    assert chosen().latency == 9


def test_float16_takes_the_entry_of_bfloat16_unless_it_has_its_own(folders):
    user, shipped = folders
    half = BUCKET._replace(dtype="float16")
    tables.update(user, TARGET, {BUCKET: ENTRY})
    assert chosen(half) == chosen() != backward_config(4096, 2, 90)
    tables.update(user, TARGET, {half: Entry(Config("rows", 4096, 8, 2, 9), ())})
    assert chosen(half).latency == 9 and chosen().latency == ENTRY.config.latency


def test_shipped_for_is_what_any_gpu_takes_for_such_rows(folders):
    """Of other GPUs and toolkits, and of a dtype of that size; not of other widths, sizes or ops, nor the user's."""
    half = Entry(Config("tiles", 4096, 8, 1, 2, tma=True), ENTRY.timings)
    wide = BUCKET._replace(n=8192)
    tables.update(
        folders[1], TARGET, {BUCKET: ENTRY, wide: Entry(Config("rows", 8192, 8, 1, 4), ENTRY.timings)}
    )
    tables.update(
        folders[1],
        TARGET._replace(gpu="NVIDIA H200", tileiras="13.5.1"),
        {BUCKET: ENTRY, BUCKET._replace(dtype="float16"): half, BUCKET._replace(size="few"): half},
    )
    tables.update(folders[0], TARGET, {BUCKET: Entry(Config("rows", 4096, 8, 1, 9), ENTRY.timings)})
    for dtype in ("bfloat16", "float16"):
        assert tables.shipped_for(BUCKET._replace(dtype=dtype)) == [ENTRY.config, half.config]
    assert tables.shipped_for(BUCKET._replace(dtype="float32")) == []
    assert tables.shipped_for(BUCKET._replace(op="forward")) == []
    assert tables.shipped_for(BUCKET._replace(op="dx")) == [ENTRY.config, half.config]


def test_no_team_serves_that_may_not_fit_the_gpu(folders):
    """Its blocks would wait for those that never start: a GPU of which a process may use a few SMs."""
    wide = BUCKET._replace(n=65536)
    slice_of = SimpleNamespace(target=TARGET, architecture=90, most_members=7)
    tables.update(folders[0], TARGET, {wide: Entry(Config("teams", 8192, 4, 2, 4, members=8), ())})
    assert chosen(wide).members == 8 and chosen(wide).latency == 4
    assert chosen(wide, slice_of) == backward_config(65536, 2, 90, most_members=7)
    assert chosen(wide, slice_of).members == 1
    assert chosen(wide._replace(n=32768), slice_of).members == 4
    assert row_partials_config(65536, 2, 90, most_members=7).members == 1
    for n in (32768, 65536):
        tried = candidates(wide._replace(n=n), 2, 90, most_members=7)
        assert all(config.members <= 7 for config in tried)


def test_the_interpreter_has_no_tables(folders, monkeypatch):
    """Nor does it read files for the versions of a toolkit, a hundred times in a test of batch sizes."""
    tables.update(folders[0], TARGET, {BUCKET: ENTRY})
    monkeypatch.setattr(toolchain, "package_version", lambda name: pytest.fail(f"asks for {name}"))
    machine = InterpretedMachine()
    assert machine.target is None and chosen(machine=machine) == backward_config(4096, 2, 90)


def test_launch_asks_for_the_size_class_and_keeps_one_choice_for_all_its_batch_sizes(folders, monkeypatch):
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from tilegym_rmsnorm.backends.cutile import launch
    from tilegym_rmsnorm.backends.cutile.plans import select, sizes
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    monkeypatch.setattr(machine.InterpretedMachine, "target", TARGET)
    monkeypatch.setattr(sizes, "FEW_ROWS", 5)
    monkeypatch.setattr(sizes, "SMALL", 10 * 64)
    asked = []

    def spied(op, machine, n, dtype, size, weight_dtype):
        asked.append((op, n, size))
        return select.chosen_config(op, machine, n, dtype, size, weight_dtype)

    monkeypatch.setattr(launch, "chosen_config", spied)
    bucket = Bucket("forward", 64, "float32", "large")
    tables.update(folders[0], TARGET, {bucket: Entry(Config("tiles", 64, 4, 1, 9, rows=2), ())})
    for made in (launch._forward, launch._backward):
        made.cache_clear()
    try:
        weight, ones = torch.ones(64), torch.ones(12)
        for m in (1, 5, 6, 10, 11, 12):
            x = torch.randn(m, 64)
            y, _ = launch.rms_norm_forward(x, weight, None, 1e-6, 0.0, "once")
            for needs_dw in (True, False):
                launch.rms_norm_backward(x, x, weight, ones[:m], 0.0, "once", needs_dw)
            torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
    finally:
        for made in (launch._forward, launch._backward):
            made.cache_clear()
    assert asked == [(op, 64, size) for size in SIZES for op in ("forward", "backward", "dx")]


def test_a_toolkit_that_does_not_say_its_version_has_no_tables(folders, monkeypatch):
    tables.update(folders[0], TARGET, {BUCKET: ENTRY})
    silent = toolchain.Tileiras("tileiras", "PATH", None, inherits_cuda_home=True)
    monkeypatch.setattr(toolchain, "find_tileiras", lambda: silent)
    assert toolchain.target_of(TARGET.gpu, 90) is None
    machine = SimpleNamespace(target=None, architecture=90, most_members=16)
    assert chosen(machine=machine) == backward_config(4096, 2, 90)


def test_no_tma_before_hopper():
    config = Config("tiles", 128, 4, 2, 4, rows=16, tma=True)
    bucket = Bucket("backward", 128, "bfloat16", "small")
    tables.check_config(config, bucket, 90)
    with pytest.raises(ValueError, match="tma: expected false on sm_89"):
        tables.check_config(config, bucket, 89)


def test_no_tma_for_tiles_of_the_forward():
    config = Config("tiles", 128, 4, 2, 4, rows=16, tma=True)
    tables.check_config(config, Bucket("backward", 128, "bfloat16", "small"), 90)
    with pytest.raises(ValueError, match="tma: expected false, or kernel of"):
        tables.check_config(config, Bucket("forward", 128, "bfloat16", "small"), 90)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_rules_choose_would_be_accepted_from_a_table(architecture):
    for dtype, itemsize in problem.ITEMSIZE.items():
        narrow = (1, 7, 64, 100, 1000, 1024, 2880, 4096, 4097, 5120, 7168, 8192)
        wide = (12288, 14352, 16384, 18432, 20000, 20480, 32768, 40000, 65536, 131072)
        for n in (*narrow, *wide):
            for size in (each for each in SIZES if rows_of_class(each, n)):
                for op, rule in select.RULES.items():
                    beside_float32 = beside_float32_config(op, n, itemsize, architecture, size)
                    for config in (rule(n, itemsize, architecture, size), beside_float32):
                        if config is not None:
                            tables.check_config(config, Bucket(op, n, dtype, size), architecture)


@pytest.mark.parametrize("path", sorted(tables.SHIPPED_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tables_are_fit_and_bear_their_name(path):
    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    target = Target(**{name: data[name] for name in Target._fields})
    assert tables.table_path(path.parent, target) == path
    table = tables.parse(text, target)
    assert table and text == tables.render(target, table)
    for bucket, entry in table.items():
        assert entry.timings, f"{bucket}: no figure"
        assert all(each.us <= MOST_LOSS[bucket.size] * each.us_rules for each in entry.timings), (
            f"{bucket}: slower than the rules"
        )
