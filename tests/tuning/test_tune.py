# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""`python -m tilegym_rmsnorm tune`: what it stores, what it says, and how it fails."""

import sys

import pytest
import torch
from helpers import why_skip
from table_cases import TARGET, choice, entry_of, write_with_rope

from tilegym_rmsnorm import __main__, settings
from tilegym_rmsnorm.backends import registry
from tilegym_rmsnorm.backends.cutile.plans.problem import FORMS, OPS, PLAIN_ROWS, Bucket
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardTeam, BackwardTiles, ForwardTiles
from tilegym_rmsnorm.backends.cutile.runtime import machine, tables
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE
from tilegym_rmsnorm.backends.cutile.tuning import search, workers


@pytest.fixture
def gpu(folders, finder, monkeypatch):
    """A GPU that is the interpreter in truth: the command's own path with its tables, without its processes."""
    facts = machine.InterpretedMachine.facts._replace(target=TARGET)
    monkeypatch.setattr(machine.InterpretedMachine, "facts", facts)
    interpreted = machine.InterpretedMachine()
    monkeypatch.setattr(machine, "machine_of", lambda device: interpreted)
    monkeypatch.setattr(registry, "why_unusable", lambda *_: None)

    def search_of(machine, device, tell, turn):
        finder.tell = tell
        return finder

    monkeypatch.setattr(search, "Search", search_of)
    monkeypatch.setattr(workers, "machine_of", lambda device: interpreted)
    monkeypatch.setattr(workers, "count_processes", lambda device, buckets: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return folders


def buckets_in(folder) -> list[Bucket]:
    return [bucket for entry in tables.table_in(folder, TARGET) for bucket in entry.buckets()]


def run(*options: str) -> int:
    return __main__.main(["tune", "--n", "64", "--candidates", "3", *options])


def test_what_is_tuned_is_stored_and_chosen_from_then_on(gpu, capsys):
    assert run("--size", "large") == 0
    output = capsys.readouterr().out
    path = tables.table_path(gpu[0], TARGET)
    assert f"3 of 3 tuned: {path}" in output
    table = tables.table_in(gpu[0], TARGET)
    assert set(buckets_in(gpu[0])) == {
        Bucket(op, 64, "bfloat16", "large") for op in ("forward", "backward", "dx")
    }
    for entry in table:
        [bucket] = entry.buckets()
        chosen = choice(bucket, machine.InterpretedMachine.facts)
        assert chosen.first == entry.variant(64) and chosen.source.startswith("the entry for 64 columns")
        assert [timing["gpu"] for timing in entry.evidence] == [TARGET.gpu] * len(search.rows_of(bucket))


@pytest.mark.parametrize("op", ["backward", "dx"])
def test_what_serves_until_then_is_tried(gpu, finder, monkeypatch, op):
    """The user's table counts too, where dx alone takes what the backward has."""
    serving = BackwardTiles(width=64, warps=4, occupancy=1, latency=9, rows=2)
    tables.update(gpu[0], TARGET, [entry_of(Bucket("backward", 64, "bfloat16", "large"), serving)])
    tried, real = [], finder.tune
    monkeypatch.setattr(finder, "tune", lambda bucket, some: (tried.extend(some), real(bucket, some))[1])
    assert run("--size", "large", "--op", op) == 0
    assert serving in tried


def test_beside_a_float32_weight_entries_are_of_their_own(gpu, capsys):
    assert (
        run("--size", "large", "--op", "forward", "--weight", "same,float32", "--dtype", "bfloat16,float32")
        == 0
    )
    output = capsys.readouterr().out
    assert (
        "3 of 3 tuned" in output and "forward bfloat16 N = 64 large beside a float32 weight: M = " in output
    )
    assert set(buckets_in(gpu[0])) == {
        Bucket("forward", 64, "bfloat16", "large"),
        Bucket("forward", 64, "bfloat16", "large", "float32"),
        Bucket("forward", 64, "float32", "large"),
    }


OTHERS = tuple(form for form in FORMS if form != PLAIN_ROWS)


@pytest.mark.parametrize("form", OTHERS)
def test_forms_are_tuned_where_they_are_named(gpu, form, capsys):
    assert run("--size", "large", "--form", form) == 0
    output = capsys.readouterr().out
    buckets = {Bucket(op, 64, "bfloat16", "large", form=form) for op in OPS}
    assert set(buckets_in(gpu[0])) == {bucket for bucket in buckets if bucket.has_calls}
    for bucket in buckets:
        assert (f"{bucket.op} bfloat16 N = 64 large, {form}: M = " in output) == bucket.has_calls
    for entry in tables.table_in(gpu[0], TARGET):
        [bucket] = entry.buckets()
        chosen = choice(bucket, machine.InterpretedMachine.facts)
        assert chosen.first == entry.variant(64)
        assert chosen.source == f"the entry for 64 columns of {bucket.op}, bfloat16, {form}"
    assert run("--size", "large", "--op", "forward", "--form", f"plain,{form}", "--skip-tuned") == 0
    assert "1 of 1 tuned" in capsys.readouterr().out
    assert Bucket("forward", 64, "bfloat16", "large") in buckets_in(gpu[0])


@pytest.mark.parametrize(("op", "form"), [("forward", "d_residual"), ("dx", "bias")])
def test_ops_that_have_no_calls_of_a_form_are_left_out(gpu, op, form, capsys):
    assert run("--op", op, "--form", form) == 0
    assert "0 of 0 tuned" in capsys.readouterr().out
    assert run("--op", op, "--form", f"plain,{form}", "--size", "large") == 0
    assert buckets_in(gpu[0]) == [Bucket(op, 64, "bfloat16", "large")]


def test_widths_that_no_kernel_takes_with_a_form_are_left_out(gpu, capsys):
    """There db is summed beside plain calls, which have entries of their own."""
    assert run("--n", "20480,32768", "--form", "bias", "--op", "backward") == 0
    assert "0 of 0 tuned" in capsys.readouterr().out


def test_skip_tuned_leaves_what_is_there(gpu, capsys):
    assert run("--op", "forward", "--size", "small") == 0
    before = list(tables.table_in(gpu[0], TARGET))
    assert run("--op", "forward", "--skip-tuned") == 0
    assert "2 of 2 tuned" in capsys.readouterr().out
    after = list(tables.table_in(gpu[0], TARGET))
    assert len(before) == 1 and len(after) == 3 and before[0] in after
    assert run("--op", "forward", "--skip-tuned") == 0
    assert "0 of 0 tuned" in capsys.readouterr().out


@pytest.mark.parametrize("options", [(), ("--skip-tuned",)])
def test_a_table_with_records_of_rope_is_tuned_further(gpu, options, capsys):
    other = Bucket("forward", 64, "bfloat16", "few")
    serving = ForwardTiles(width=64, warps=4, occupancy=1, latency=9, rows=2)
    path = write_with_rope(gpu[0], entry_of(other, serving))
    with pytest.warns(UserWarning, match="records of the form rope in the table for") as caught:
        assert run("--op", "forward", "--size", "large", *options) == 0
    assert len(caught) == 1 and "1 of 1 tuned" in capsys.readouterr().out
    assert set(buckets_in(gpu[0])) == {other, other._replace(size="large")} and "rope" not in path.read_text()


def test_a_class_that_no_number_of_rows_has_is_left_out(gpu, capsys):
    assert run("--n", "320", "--op", "forward") == 0  # as 4096 with a real GPU's sizes
    assert "2 of 2 tuned" in capsys.readouterr().out
    assert {bucket.size for bucket in buckets_in(gpu[0])} == {"few", "large"}
    assert run("--n", "320", "--size", "small") == 0
    assert "0 of 0 tuned" in capsys.readouterr().out


def test_what_teams_serve_is_left_out_where_they_are_ruled_out(gpu, capsys):
    """An entry of another kernel would keep teams out of processes that allow them."""
    settings.set_teams(False)
    assert run("--n", "40000", "--size", "large", "--op", "backward") == 0
    output = capsys.readouterr().out
    assert "1 buckets are left out: teams serve them" in output and "0 of 0 tuned" in output
    assert run("--op", "forward", "--size", "large") == 0
    assert "1 of 1 tuned" in capsys.readouterr().out


def test_what_a_team_of_an_entry_serves_is_left_out_too(gpu, capsys):
    bucket = Bucket("backward", 64, "bfloat16", "large")
    team = BackwardTeam(width=16, warps=4, occupancy=1, latency=2, members=4)
    tables.update(gpu[0], TARGET, [entry_of(bucket, team)])
    settings.set_teams(False)
    assert run("--op", "backward", "--size", "large") == 0
    assert "1 buckets are left out: teams serve them" in capsys.readouterr().out
    assert [each.variant(64) for each in tables.table_in(gpu[0], TARGET)] == [team]


def test_out_names_another_folder(gpu, tmp_path):
    assert run("--op", "forward", "--out", str(tmp_path / "other")) == 0
    assert tables.table_path(tmp_path / "other", TARGET).exists()
    assert not gpu[0].exists()


def test_a_bucket_with_nothing_right_fails_alone(gpu, finder, monkeypatch, capsys):
    monkeypatch.setattr(finder, "why_wrong", lambda bucket, variant: "no" if bucket.op == "forward" else None)
    assert run("--size", "large") == 1
    captured = capsys.readouterr()
    assert "2 of 3 tuned" in captured.out and "none of" in captured.err
    assert {bucket.op for bucket in buckets_in(gpu[0])} == {"backward", "dx"}


def test_a_lost_context_ends_the_run(gpu, finder, monkeypatch, capsys):
    def lost(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(finder, "why_wrong", lambda *_: "no")
    monkeypatch.setattr(finder, "synchronize", lost)
    assert run() == 1
    captured = capsys.readouterr()
    assert "the CUDA context is lost: an illegal memory access" in captured.err
    assert captured.err.count("failed: ") == 2 and "0 of 9 tuned" in captured.out
    assert (
        "the rest: not searched after that. To go on from there: the same command with --skip-tuned"
        in captured.err
    )


def test_an_interrupted_run_says_how_to_go_on(gpu, finder, monkeypatch, capsys):
    real = finder.tune

    def interrupted(bucket, variants):
        if bucket.size == "small":
            raise KeyboardInterrupt
        return real(bucket, variants)

    monkeypatch.setattr(finder, "tune", interrupted)
    assert run("--op", "forward", "--size", "large,small") == 1
    captured = capsys.readouterr()
    assert "1 of 2 tuned" in captured.out and len(tables.table_in(gpu[0], TARGET)) == 1
    assert "the rest: interrupted. To go on from there: the same command with --skip-tuned" in captured.err


def test_progress_without_tqdm(gpu, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # what `import` refuses
    assert run("--size", "large") == 0
    output = capsys.readouterr().out
    assert "[0/3] 3 buckets in 1 process" in output
    for number, op in enumerate(("forward", "backward", "dx")):
        assert f"[{number}/3] {op} bfloat16 N = 64 large: M = 48: " in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--n", "64,x"), "expected a whole number of at least 1, got 'x'"),
        (("--n", "0"), "expected a whole number of at least 1, got '0'"),
        (("--dtype", "bf16"), "expected some of bfloat16, float16, float32, got bf16"),
        (("--op", "forward,sideways"), "expected some of forward, backward, dx, got sideways"),
        (("--size", ""), "expected some of few, small, large, got "),
        (("--weight", "bfloat16"), "expected some of same, float32, got bfloat16"),
        (("--form", "heads"), f"expected some of {', '.join(FORMS)}, got heads"),
        (("--candidates", "-1"), "expected a whole number of at least 1, got '-1'"),
    ],
)
def test_wrong_options(options, message, capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main(["tune", *options])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
    assert __main__.main(["tune"]) == 1
    error = capsys.readouterr().err
    assert "tune needs a GPU that the cuTile kernels run on: " in error and "To mend it: " in error


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda patch: patch.setenv(CACHE_VARIABLE, "off"), "the user's cache is off"),
        (
            lambda patch: patch.setattr(
                machine.InterpretedMachine, "facts", machine.InterpretedMachine.facts._replace(target=None)
            ),
            "does not say its version",
        ),
    ],
)
def test_no_place_or_no_version(gpu, monkeypatch, capsys, break_it, message):
    break_it(monkeypatch)
    assert run() == 1
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_refused_before_any_work(gpu, finder, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(finder, "tune", lambda *_: pytest.fail("searched"))
    (tmp_path / "file").write_text("")
    assert run("--out", str(tmp_path / "file" / "folder")) == 1
    assert "no table can be kept there: " in capsys.readouterr().err


@pytest.mark.gpu
def test_tunes_one_bucket_on_a_gpu(tmp_path, capsys):
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    command = [
        *("tune", "--n", "1024", "--op", "backward", "--size", "small"),
        *("--candidates", "4", "--out", str(tmp_path)),
    ]
    assert __main__.main(command) == 0, capsys.readouterr().err
    [path] = tmp_path.glob("*.json")
    tables.table_in.cache_clear()
    found = machine.machine_of(torch.device("cuda", torch.cuda.current_device()))
    target = found.facts.target
    assert path == tables.table_path(tmp_path, target)
    [entry] = tables.table_in(tmp_path, target)
    assert list(entry.buckets()) == [Bucket("backward", 1024, "bfloat16", "small")]
    assert [timing["gpu"] for timing in entry.evidence] == [target.gpu] * 2
    tables.table_in.cache_clear()
