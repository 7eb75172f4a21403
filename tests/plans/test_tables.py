# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tables of entries: which one decides, what is refused, where the files are, and what writing leaves intact."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from planning import by_rules, device, problem, rules_of
from table_cases import (
    BUCKET,
    ENTRY,
    GPU,
    TARGET,
    VARIANT,
    choice,
    chosen,
    entry_of,
    forget_files,
    rule,
    ship,
    write_with_rope,
)

from tilegym_rmsnorm.backends.cutile.plans import records, select, variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, ITEMSIZE, OPS, WEIGHTS, Bucket
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows
from tilegym_rmsnorm.backends.cutile.runtime import tables, toolchain
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE, user_folder
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted


def serves(op: str, dtype: str, weight: str | None, n: int = 4096) -> Variant:
    """Choose for many rows beside a weight of this dtype, None for none."""
    return select.choose(
        problem(op, n, dtype, "large", weight, GPU), tables.tables_of(90, TARGET, user_folder())
    ).first


def wide_rows(latency: int, n: int = 4096, **more) -> variants.BackwardRows:
    """A variant that no rule chooses."""
    return variants.BackwardRows(width=n, warps=8, occupancy=2, latency=latency, **more)


def test_rules_serve_where_no_table_has_an_entry(folders):
    for dtype in ITEMSIZE:
        for n in (64, 1000, 4096, 40000):
            for size in SIZES:
                for op in OPS:
                    found = choice(Bucket(op, n, dtype, size))
                    assert found == by_rules(op, n, dtype, size)
                    assert not (op == "dx" and isinstance(found.first, Split))


def test_without_dw_no_entry_serves_that_reads_more_for_dw(folders):
    bucket = BUCKET._replace(size="few")
    split = variants.BackwardSplit(width=4096, warps=8, occupancy=1, latency=2, rows=64, strip=32, slab=512)
    by_tma = {"warps": 8, "occupancy": 1, "latency": 4}
    strips = variants.BackwardStrips(width=2048, warps=4, occupancy=3, latency=4, tma=True)
    cases = (
        (split, False),
        (VARIANT, True),
        (variants.BackwardPipelined(width=4096, **by_tma), True),
        (strips, False),
    )
    for variant, serves_dx in cases:
        tables.update(folders[0], TARGET, [entry_of(bucket, variant)])
        assert chosen(bucket) == variant
        found = chosen(bucket._replace(op="dx"))
        assert (found == variant) is serves_dx and not isinstance(found, Split)


def test_a_backward_without_dw_has_entries_of_its_own(folders):
    """Wherever they are, they come before those of backwards with dw, for which they are nothing."""
    user, shipped = folders
    alone, alone_of_float16 = (BUCKET._replace(op="dx", dtype=dtype) for dtype in ("bfloat16", "float16"))
    by_tma = variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=2, rows=2, tma=True)
    tables.update(user, TARGET, [ENTRY])
    assert chosen(alone) == VARIANT
    ship(shipped, TARGET, entry_of(alone, by_tma))
    assert chosen(alone) == chosen(alone_of_float16) == by_tma
    assert chosen() == VARIANT
    reread = variants.BackwardReread(width=4096, warps=4, occupancy=2, latency=4, tma=True)
    tables.update(user, TARGET, [entry_of(alone, reread)])
    assert chosen(alone) == reread, "no kernel of a backward with dw"


def test_the_users_table_comes_before_the_shipped_one(folders):
    user, shipped = folders
    wide = BUCKET._replace(n=8192)
    ship(shipped, TARGET, entry_of(BUCKET, wide_rows(5)), entry_of(wide, wide_rows(6, 8192)))
    assert chosen() == wide_rows(5)
    tables.update(user, TARGET, [ENTRY])
    assert chosen() == VARIANT
    assert chosen(wide) == wide_rows(6, 8192), "what ships serves what the user's table has not"


def test_an_entry_serves_its_own_bucket_only(folders):
    tables.update(folders[0], TARGET, [ENTRY])
    assert choice().source == "the entry for 4096 columns of backward, bfloat16"
    for change in ({"n": 4097}, {"n": 4080}, {"dtype": "float32"}, {"size": "few"}, {"size": "small"}):
        bucket = BUCKET._replace(**change)
        assert choice(bucket) == by_rules(bucket.op, bucket.n, bucket.dtype, bucket.size), change
    assert chosen(BUCKET._replace(op="forward")) == by_rules("forward", 4096).first


def test_entries_of_a_float32_weight_come_first_and_serve_nothing_else(folders):
    user, shipped = folders
    beside = Bucket("backward", 4096, "bfloat16", "large", FLOAT32)
    tuned = variants.BackwardPipelined(width=1024, warps=4, occupancy=2, latency=4, pieces=4)
    tables.update(user, TARGET, [ENTRY])
    path = ship(shipped, TARGET, entry_of(beside, tuned))
    for dtype in ("bfloat16", "float16"):
        for op in ("backward", "dx"):
            assert serves(op, dtype, "float32") == tuned, "the user has none of such a weight"
        assert serves("backward", dtype, dtype) == serves("backward", dtype, None) == VARIANT
    assert serves("backward", "float32", "float32") == by_rules("backward", 4096, "float32").first
    assert json.loads(path.read_text())["records"][0]["weights"] == ["float32"]
    assert "weights" not in json.loads(next(user.glob("*.json")).read_text())["records"][0]


def test_an_entry_does_not_serve_16_bit_rows_beside_a_float32_weight_that_have_rules(folders):
    """Entries are timed beside a weight of x's dtype: on an H200 8192x7168 took 151.5 us so, by the rules 100.3."""
    half, single = "bfloat16", "float32"
    numbers = {"width": 8192, "warps": 8}
    entries = {
        "forward": variants.ForwardRows(occupancy=2, latency=4, **numbers),
        "backward": variants.BackwardRows(occupancy=1, latency=8, **numbers),
    }
    for op, variant in entries.items():
        for dtype in (half, single):
            tables.update(folders[0], TARGET, [entry_of(Bucket(op, 7168, dtype, "large"), variant)])
        assert serves(op, half, None, 7168) == serves(op, half, half, 7168) == variant
        assert variant != serves(op, half, single, 7168) == serves(op, "float16", single, 7168)
        assert serves(op, single, single, 7168) == serves(op, single, None, 7168) == variant
        for n in (1000, 1024):  # have no such rules
            assert serves(op, half, single, n) == serves(op, half, None, n)


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H200"}, {"cuda_tile": "1.8.0"}, {"tileiras": "13.5.37"}])
def test_tables_of_other_gpus_and_toolkits_neither_count_nor_are_touched(folders, change):
    user, shipped = folders
    other = TARGET._replace(**change)
    path = tables.update(user, other, [ENTRY])
    before = path.read_bytes()
    if "gpu" in change:
        ship(shipped, other, ENTRY)
    assert chosen() == rule()
    assert chosen(facts=device(target=other)) == VARIANT
    tables.update(user, TARGET, [entry_of(BUCKET, wide_rows(9))])
    assert path.read_bytes() == before
    assert chosen().latency == 9


def test_float16_takes_the_entry_of_bfloat16_unless_it_has_its_own(folders):
    user, _ = folders
    half = BUCKET._replace(dtype="float16")
    tables.update(user, TARGET, [ENTRY])
    assert chosen(half) == chosen() != rule()
    tables.update(user, TARGET, [entry_of(half, wide_rows(9))])
    assert chosen(half).latency == 9 and chosen().latency == VARIANT.latency


def test_shipped_for_is_what_any_gpu_takes_for_such_rows(folders):
    """Variants of other GPUs, rules and dtypes of that size; not of other widths, sizes or ops, nor the user's."""
    half = variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=2, tma=True)
    wide, few = BUCKET._replace(n=8192), BUCKET._replace(size="few")
    ship(
        folders[1],
        TARGET._replace(gpu="NVIDIA H200", tileiras="13.5.1"),
        *(ENTRY, entry_of(BUCKET._replace(dtype="float16"), half), entry_of(few, half)),
    )
    ship(folders[1], TARGET._replace(tileiras="13.5.1"), ENTRY, entry_of(wide, wide_rows(4, 8192)))
    tables.update(folders[0], TARGET, [entry_of(BUCKET, wide_rows(9))])
    for dtype in ("bfloat16", "float16"):
        found = tables.shipped_for(BUCKET._replace(dtype=dtype))
        assert {VARIANT, half, rule()} < {*found} and not {wide_rows(9), wide_rows(4, 8192)} & {*found}
    for other in (BUCKET._replace(dtype="float32"), BUCKET._replace(op="forward")):
        assert not {VARIANT, half} & {*tables.shipped_for(other)}
    assert {VARIANT, half} < {*tables.shipped_for(BUCKET._replace(op="dx"))}


def test_no_team_serves_that_may_not_fit_the_gpu(folders):
    """Its blocks would wait for those that never start: a GPU of which a process may use a few SMs."""
    wide = BUCKET._replace(n=65536)
    slice_of = device(most_members=7, target=TARGET)
    team = variants.BackwardTeam(width=8192, warps=4, occupancy=2, latency=4, members=8)
    tables.update(folders[0], TARGET, [entry_of(wide, team)])
    assert chosen(wide) == team
    assert chosen(wide, slice_of) == rule(wide, slice_of)
    assert chosen(wide, slice_of).members <= 7
    assert chosen(wide._replace(n=32768), slice_of).members <= 7
    own = select.select(problem("backward", 65536, facts=slice_of, partials="own"), rules_of())
    assert own.first.members <= 7
    for n in (32768, 65536):
        tried = candidates(wide._replace(n=n), 90, most_members=7)
        assert tried and all(variant.members <= 7 for variant in tried)


def test_the_interpreter_has_no_tables(folders, monkeypatch):
    """Nor does it read files for the versions of a toolkit, a hundred times in a test of batch sizes."""
    tables.update(folders[0], TARGET, [ENTRY])
    monkeypatch.setattr(toolchain, "package_version", lambda name: pytest.fail(f"asks for {name}"))
    machine = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine", exc_type=ImportError)
    facts = machine.InterpretedMachine().facts
    assert facts.target is None and chosen(facts=facts) == rule()


@pytest.mark.usefixtures("fresh_plans")
def test_launch_asks_for_the_size_class_and_keeps_one_plan_for_all_its_batch_sizes(folders, monkeypatch):
    from tilegym_rmsnorm.backends.cutile import launch
    from tilegym_rmsnorm.backends.cutile.host import norm
    from tilegym_rmsnorm.backends.cutile.plans import sizes

    machine = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine", exc_type=ImportError)
    facts = machine.InterpretedMachine.facts._replace(target=TARGET)
    monkeypatch.setattr(machine.InterpretedMachine, "facts", facts)
    monkeypatch.setattr(sizes, "FEW_ROWS", 5)
    monkeypatch.setattr(sizes, "SMALL", 10 * 64)
    asked, plan_for = [], norm.plan_for

    def spied(problem):
        plan = plan_for(problem)
        asked.append((problem.op, problem.n, problem.size, plan.first))
        return plan

    monkeypatch.setattr(norm, "plan_for", spied)
    tuned = variants.ForwardTiles(width=64, warps=4, occupancy=1, latency=9, rows=2)
    tables.update(folders[0], TARGET, [entry_of(Bucket("forward", 64, "float32", "large"), tuned)])
    spec, weight, ones = Spec(64, 1e-6, 0.0, "once"), torch.ones(64), torch.ones(12)
    for m in (1, 5, 6, 10, 11, 12):
        x = torch.randn(m, 64)
        y, *_ = launch.rms_norm_forward(spec, (x, weight, None, None))
        for needs_dw in (True, False):
            wanted = Wanted(x.dtype, dw=weight.dtype if needs_dw else None)
            launch.rms_norm_backward(spec, (x, x, weight, ones[:m], None), wanted)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, 1e-6))
    assert [each[:3] for each in asked] == [(op, 64, size) for size in SIZES for op in OPS]
    assert [op for op, _, _, first in asked if first == tuned] == ["forward"] and asked[6][3] == tuned


def test_a_toolkit_that_does_not_say_its_version_has_no_tables(folders, monkeypatch):
    tables.update(folders[0], TARGET, [ENTRY])
    silent = toolchain.Tileiras("tileiras", "PATH", None, inherits_cuda_home=True)
    monkeypatch.setattr(toolchain, "find_tileiras", lambda: silent)
    assert toolchain.target_of(TARGET.gpu, 90) is None
    assert chosen(facts=device(target=None)) == rule()


@pytest.mark.parametrize("kernel", variants.BY_KERNEL)
def test_a_kernel_that_does_not_go_through_columns_holds_a_whole_row(kernel):
    """A row's last columns would be left as they were."""
    numbers = {"width": 1024, "warps": 8, "occupancy": 1, "latency": 4}
    others = {"members": 2, "rows": 8, "strip": 64, "slab": 64, "vector": 8}
    fields = {each.name for each in dataclasses.fields(variants.BY_KERNEL[kernel])}
    variant = variants.BY_KERNEL[kernel](**numbers, **{name: others[name] for name in fields & others.keys()})
    variant.check(variant.lanes, 2, 90)
    if kernel in ("forward_reread", "backward_reread", "backward_split_reread", "backward_strips"):
        variant.check(variant.lanes + 8, 2, 90)
    else:
        with pytest.raises(ValueError, match=f"columns of all tiles: expected at least {variant.lanes + 8}"):
            variant.check(variant.lanes + 8, 2, 90)


def test_no_tma_before_hopper():
    numbers = {"width": 128, "warps": 4, "occupancy": 2, "latency": 4}
    for variant in (
        variants.BackwardTiles(rows=16, tma=True, **numbers),
        variants.BackwardPipelined(**numbers),
    ):
        variant.check(128, 2, 90)
        with pytest.raises(ValueError, match="TMA: expected none on sm_89"):
            variant.check(128, 2, 89)


def test_no_tma_for_tiles_of_the_forward():
    """tileiras 13.4 makes some of them of warps that together ask for more registers than a block has, and wait
    forever: M x 1 on an H100."""
    numbers = {"width": 128, "warps": 4, "occupancy": 2, "latency": 4, "rows": 16}
    with pytest.raises(TypeError, match="tma"):
        variants.ForwardTiles(tma=True, **numbers)
    assert not variants.ForwardTiles(**numbers).uses_tma


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_rules_choose_would_be_accepted_from_a_table(architecture):
    for dtype, itemsize in ITEMSIZE.items():
        narrow = (1, 7, 64, 100, 1000, 1024, 2880, 4096, 4097, 5120, 7168, 8192)
        wide = (12288, 14352, 16384, 18432, 20000, 20480, 32768, 40000, 65536, 131072)
        for n in (*narrow, *wide):
            for size in (each for each in SIZES if rows_of_class(each, n)):
                for op in OPS:
                    for weight in WEIGHTS[: 2 if itemsize == 2 else 1]:
                        first = by_rules(op, n, dtype, size, weight, architecture=architecture).first
                        text = records.render(entry_of(Bucket(op, n, dtype, size, weight), first))
                        assert records.parse(json.loads(text), architecture).variant(n) == first


@pytest.mark.parametrize("path", sorted(tables.SHIPPED_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_records_are_fit_and_are_written_as_they_would_be(path):
    from tilegym_rmsnorm.backends.cutile.tuning.search import MOST_LOSS

    text = path.read_text(encoding="utf-8")
    data = json.loads(text)
    assert data["schema"] == records.SCHEMA
    architecture = None if path.stem == "any" else data["architecture"]
    assert path.stem == ("any" if architecture is None else f"sm_{architecture}")
    shipped = tables.shipped_records(architecture)
    lines = [line.strip().removesuffix(",") for line in text.splitlines() if line.startswith("  {")]
    assert lines == [records.render(record) for record in shipped]
    assert len([record for record in shipped if record.gpus]) <= 60, "speed is to hang on rules"
    for record in shipped:
        assert record.gpus or not record.is_entry, "a rule is for a range"
        for bucket in record.buckets() if record.gpus else ():
            assert record.evidence, f"{bucket}: no figure"
            timed = [each for each in record.evidence if "us" in each]
            assert all(each["us"] <= MOST_LOSS[bucket.size] * each["before"] for each in timed), (
                f"{bucket}: slower than the rules"
            )
        if not record.lends:  # a rule that was timed beside what served, which `by` does not name
            timed = [each for each in record.evidence if "before" in each and "by" not in each]
            assert all(each["us"] <= 1.04 * each["before"] for each in timed), f"{record}: slower than before"


def test_an_unfit_table_is_replaced_by_the_next_write(folders):
    path = tables.table_path(folders[0], TARGET)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.warns(UserWarning, match="are ignored"):
        assert tables.update(folders[0], TARGET, [ENTRY]) == path
    assert chosen() == VARIANT


def test_a_write_that_fails_leaves_the_old_table_and_nothing_else(folders, monkeypatch):
    path = tables.update(folders[0], TARGET, [ENTRY])
    before = path.read_bytes()

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(tables.os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        tables.update(folders[0], TARGET, [])
    assert path.read_bytes() == before
    assert {file.suffix for file in path.parent.iterdir()} <= {".json", ".lock"}


def test_a_table_that_cannot_be_read_is_not_written_over(folders, monkeypatch):
    """Taking a table for an empty one would lose its entries."""
    path = tables.update(folders[0], TARGET, [ENTRY])
    before = path.read_bytes()

    def broken(*_, **__):
        raise OSError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        patch.setattr(Path, "read_text", broken)
        with pytest.raises(OSError, match="Input/output error"):
            tables.update(folders[0], TARGET, [])
    assert path.read_bytes() == before


def test_a_write_replaces_the_entries_of_its_buckets_and_leaves_the_others(folders):
    """One of several buckets goes on serving those that no other is for."""
    half, few = BUCKET._replace(dtype="float16"), BUCKET._replace(size="few")
    own, both = (BackwardRows(width=4096, warps=8, occupancy=2, latency=latency) for latency in (5, 6))
    of_two = entry_of(BUCKET, both)._replace(dtypes=("bfloat16", "float16"))
    tables.update(folders[0], TARGET, [of_two, entry_of(few, own)])
    assert chosen() == chosen(half) == both
    tables.update(folders[0], TARGET, [ENTRY])
    assert (chosen(), chosen(half), chosen(few)) == (VARIANT, both, own)
    assert len(tables.table_in(folders[0], TARGET)) == 3
    tables.update(folders[0], TARGET, [entry_of(half, own)])
    assert (chosen(), chosen(half), chosen(few)) == (VARIANT, own, own)
    tables.update(folders[0], TARGET, [of_two])
    assert chosen() == chosen(half) == both and len(tables.table_in(folders[0], TARGET)) == 2


def test_records_of_rope_are_ignored_with_one_warning_and_the_others_serve(folders):
    """`tune` wrote them once. The next write leaves them out."""
    path, few = write_with_rope(folders[0], ENTRY), BUCKET._replace(size="few")
    with pytest.warns(UserWarning) as caught:
        assert chosen() == VARIANT
        tables.update(folders[0], TARGET, [entry_of(few, VARIANT)])
        assert chosen() == chosen(few) == VARIANT
    [message] = (str(each.message) for each in caught)
    assert "are ignored: qk_norm_rope takes the rules' settings. The other records serve" in message
    assert len(tables.table_in(folders[0], TARGET)) == 2 and "rope" not in path.read_text()


def test_what_chooses_is_described(folders):
    user, shipped = folders
    rules = "the rules of plans/; none are for {} alone: `python -m tilegym_rmsnorm tune` makes some"
    assert tables.describe(TARGET, user) == rules.format(TARGET)
    assert tables.describe(None, user) == rules.format("this GPU")
    ship(shipped, TARGET, ENTRY, entry_of(BUCKET._replace(size="few"), VARIANT))
    assert tables.describe(TARGET, user) == "2 that ship for it, then the rules of plans/"
    path = tables.update(user, TARGET, [ENTRY])
    assert tables.describe(TARGET, user) == f"1 in {path}, then 2 that ship for it, then the rules of plans/"
    assert tables.describe(TARGET, None) == "2 that ship for it, then the rules of plans/"


def test_what_ships_serves_any_toolkit_and_the_users_entries_their_own(folders):
    """The rules served after an update of cuda-tile, and nothing said so."""
    user, shipped = folders
    target, few = TARGET._replace(cuda_tile="1.7.99"), BUCKET._replace(size="few")
    ship(shipped, TARGET, ENTRY)
    tables.update(user, TARGET, [entry_of(few, VARIANT)])
    facts = device(target=target)
    assert chosen(facts=facts) == VARIANT and chosen(few, facts) == rule(few)
    assert tables.describe(target, user) == "1 that ship for it, then the rules of plans/"


@pytest.mark.parametrize("value", ["0", "off", " OFF ", "false", "no", "none", "None", ""])
def test_the_users_cache_can_be_off(folders, monkeypatch, value):
    monkeypatch.setenv(CACHE_VARIABLE, value)
    assert user_folder() is None
    assert chosen() == rule()


def test_the_users_cache_is_where_the_platform_keeps_caches(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert user_folder() == Path(platformdirs.user_cache_dir("tilegym_rmsnorm", appauthor=False))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert user_folder() is None


@pytest.mark.parametrize("name", ["1", "on", "yes", "./off"])
def test_the_users_cache_may_have_any_other_name(monkeypatch, name):
    monkeypatch.setenv(CACHE_VARIABLE, name)
    assert user_folder() == Path(name)


def test_the_users_cache_may_be_named_from_home(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "~/tuned")
    assert user_folder() == Path.home() / "tuned"


def test_a_file_that_ships_is_read_once(folders, monkeypatch):
    """Parsing once for each record took 0.7 s of the first call on a GPU."""
    reads, read_text = [], Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, **k: reads.append(path.name) or read_text(path, **k))
    forget_files()
    for _ in range(2):
        tables.tables_of(90, TARGET, None)
        tables.describe(TARGET, None)
        tables.shipped_for(BUCKET)
    assert sorted(reads) == ["any.json", "sm_90.json"]
