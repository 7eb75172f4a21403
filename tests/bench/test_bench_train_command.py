# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The command `python -m bench.train`: what it refuses before it trains, what it writes, and how it ends."""

import dataclasses
import json
import re
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
from helpers import HAS_GPU
from training_steps import sizes_of

from bench.measure.provenance import ROOT, describe_run
from bench.report import curves, training
from bench.train import __main__ as command
from bench.train import kernels, measure, norms, parallel, text
from bench.train.models import MODELS, USUAL
from bench.train.norms import ways_of
from tilegym_rmsnorm import settings

pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="tiny models, on a CPU"),
    pytest.mark.usefixtures("quick_gc"),  # turns collect garbage first
]
MODEL = "decoder-2048-qk"


@pytest.fixture(autouse=True)
def _this_process(monkeypatch):
    """The command leaves neither variables nor a process group behind; its text is short."""
    fake_transformers(monkeypatch)
    monkeypatch.setattr(command, "choose_tables", lambda: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    texts = tuple(torch.arange(4000).remainder(97).to(torch.uint8).roll(number) for number in range(2))
    monkeypatch.setattr(text, "load_corpus", lambda: texts)


def fake_transformers(monkeypatch):
    if sys.modules.get("transformers") is None:
        fake = types.ModuleType("transformers")
        fake.__version__, fake.__spec__ = "5", ModuleSpec("transformers", None)
        monkeypatch.setitem(sys.modules, "transformers", fake)


def run(*options, model=MODEL, mode="--eager"):
    return command.main(["--model", model, mode, *options])


def refused(capsys, *options, **more):
    """The message of options that are refused."""
    with pytest.raises(SystemExit, match="2"):
        run(*options, **more)
    return capsys.readouterr().err


@pytest.fixture
def no_training(monkeypatch):
    """Fail where anything is measured."""
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr(text, "load_corpus", lambda: pytest.fail("it began"))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "llama-2b"), f"--model: expected some of {', '.join(MODELS)}, got llama-2b"),
        (("--model", ""), "--model: expected some of "),
        (("--norm", ""), "--norm: expected names, got ''"),
        (("--norm", "fused,"), "--norm: expected names, got 'fused,'"),
        (("--norm", "fusd"), f"--norm: expected some of {', '.join(ways_of(MODEL))}, got fusd"),
        (("--norm", "F.rms_norm,layers"), "got layers"),
        (("--compile",), "not allowed with argument --eager"),
        (("--out", ""), "--out: expected a path, got ''"),
        (("--fsdp", "0"), "--fsdp: expected a whole number of at least 1, got '0'"),
        (("--tp", "-1"), "--tp: expected a whole number of at least 1, got '-1'"),
        (("--sm-margin", "0"), "--sm-margin: expected a whole number of at least 1, got '0'"),
        (("--seconds", "0"), "--seconds: expected a whole number of at least 1, got '0'"),
    ],
)
def test_what_is_no_value_is_refused(options, message, no_training, capsys, tmp_path):
    assert message in refused(capsys, "--out", str(tmp_path), *options)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("mode", "known"), [("--eager", 7), ("--compile", 3)])
def test_ways_depend_on_the_model_and_the_mode(mode, known, no_training, capsys, tmp_path):
    """Ways that torch.compile does not change are not measured under it."""
    message = refused(capsys, "--norm", "none", "--out", str(tmp_path), model="decoder-4096", mode=mode)
    [names] = re.findall("--norm: expected some of (.*), got none", message)
    assert len(names.split(", ")) == known and names.startswith("F.rms_norm, rms_norm, residual")
    assert ("override_aten" in names) == (mode == "--eager")


@pytest.mark.parametrize("steps", ["0", "-3", "1.5", "", "2", "5"])
def test_too_few_steps_are_refused_by_one_rule(steps, no_training, capsys):
    """0 trained the 12 steps of the default. Then 0 was told of a minimum of 1, and 2 of one of 6."""
    message = f"argument --steps: expected a whole number of at least 6, got {steps!r}"
    assert message in refused(capsys, "--steps", steps)


@pytest.mark.parametrize("option", ["--fsdp", "--tp"])
def test_models_of_transformers_are_not_spread(option, no_training, capsys, tmp_path):
    message = refused(capsys, option, "2", "--out", str(tmp_path), model="decoder-4096,llama-1b")
    assert "--model: expected decoders beside --fsdp and --tp, got llama-1b" in message


def test_one_rank_needs_a_mesh_and_no_other_process(no_training, monkeypatch, capsys, tmp_path):
    given = "--one-rank", "--out", str(tmp_path)
    assert "--one-rank: expected --fsdp or --tp beside it" in refused(capsys, *given)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--one-rank: expected one process, got 4" in refused(capsys, "--fsdp", "2", "--tp", "2", *given)


@pytest.mark.parametrize("world", [None, "4"])
def test_another_number_of_processes_names_the_command(world, no_training, monkeypatch, capsys, tmp_path):
    if world:
        monkeypatch.setenv("WORLD_SIZE", world)
    message = refused(capsys, "--fsdp", "4", "--tp", "2", "--out", str(tmp_path))
    assert f"--fsdp and --tp: expected {world or 1} processes in all, got 4 x 2" in message
    assert "torchrun --nproc-per-node 8 -m bench.train" in message


def test_torchrun_of_one_process_is_one_process(without_training, monkeypatch, tmp_path):
    """It joins no group: its parameters and its result's file would be as those without torchrun."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert parallel.start(1, 1) is None
    with pytest.raises(EndedError):
        run("--out", str(tmp_path), model="llama-1b")


def test_an_error_of_a_run_is_no_matter_of_options(monkeypatch, tmp_path):
    """In a spread run an exception of a way ends it: its traceback says where."""

    def fail(*_):
        raise ValueError("it broke")

    monkeypatch.setattr(measure, "measure", fail)
    with pytest.raises(ValueError, match="it broke"):
        run("--out", str(tmp_path))


def test_several_models_are_not_spread_at_once(no_training, capsys, tmp_path):
    message = refused(capsys, "--tp", "2", "--out", str(tmp_path), model="decoder-4096,llama-8b")
    assert "--fsdp, --tp: expected one --model, and --eager or --compile" in message


def test_results_that_cannot_be_kept_are_refused_before_training(no_training, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    message = refused(capsys, "--out", str(tmp_path / "file"))
    assert "--out: no results can be kept there: " in message


def test_the_first_of_several_processes_tries_the_folder_alone(
    without_training, monkeypatch, tmp_path, capsys
):
    """Another would find the folder that the first one makes, and then removes."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(EndedError):
        run("--out", str(tmp_path / "file"))
    monkeypatch.setenv("RANK", "0")
    assert "no results can be kept there" in refused(capsys, "--out", str(tmp_path / "file"))


class EndedError(Exception):
    """Error in place of training."""


@pytest.fixture
def without_training(monkeypatch):
    """`main` as far as the first step, which ends it."""

    def end(*_):
        raise EndedError

    monkeypatch.setattr(measure, "measure", end)


def test_training_that_ends_early_leaves_no_folder(without_training, monkeypatch, tmp_path):
    """An empty bench/results/cpu was left by each such run."""
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    with pytest.raises(EndedError):
        run()
    assert list(tmp_path.iterdir()) == []


def test_the_fewest_steps_are_trained(without_training, tmp_path):
    with pytest.raises(EndedError):
        run("--steps", "6", "--out", str(tmp_path))


@pytest.mark.parametrize("missing", ["transformers", "tqdm"])
def test_training_without_a_library_says_what_to_install(missing):
    """Before anything is imported that asks for it."""
    program = f"import sys, runpy; sys.modules['{missing}'] = None; sys.argv[1:] = ['--help']\n"
    program += "runpy.run_module('bench.train', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert re.search(rf"needs {missing}\. To install .* -m pip install '.*\[bench\]'", done.stderr)


# Several models and modes


@pytest.fixture
def started(monkeypatch):
    """Record the options of each process that is started, and end it with the status that is first in `statuses`."""
    found = types.SimpleNamespace(options=[], statuses=[])

    def start(line, **more):
        assert line[:3] == [sys.executable, "-m", "bench.train"] and set(more) == {"cwd"}
        found.options.append(line[3:])
        return subprocess.CompletedProcess(line, found.statuses.pop(0) if found.statuses else 0)

    monkeypatch.setattr(command.subprocess, "run", start)
    return found


def chosen(options):
    """The model and the mode that a process of these options measures, and where."""
    found = command.make_parser().parse_args(options)
    assert found.eager != found.compile
    return found.model, found.compile, str(found.out)


def test_every_model_and_mode_has_a_process_of_its_own(started, monkeypatch, tmp_path):
    folder = str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.train", "--seconds", "3"])  # of another command
    assert command.main(["--out", folder]) == 0
    modes = [((model,), compiled, folder) for model in USUAL for compiled in (False, True)]
    assert [chosen(options) for options in started.options] == modes
    assert all("--seconds" not in options for options in started.options)


def test_options_of_the_command_line_reach_each_process(started, monkeypatch, tmp_path):
    given = [
        "--out",
        str(tmp_path),
        "--model",
        "decoder-4096,llama-8b",
        "--compile",
        "--tiny",
        "--steps",
        "7",
    ]
    monkeypatch.setattr(sys, "argv", ["bench.train", *given])
    assert command.main() == 0
    assert [chosen(options)[:2] for options in started.options] == [
        (("decoder-4096",), True),
        (("llama-8b",), True),
    ]
    parsed = [command.make_parser().parse_args(options) for options in started.options]
    assert all(each.tiny and each.steps == 7 for each in parsed)


@pytest.mark.parametrize("status", [1, 2, -9])
def test_a_process_that_fails_fails_the_command(status, started, tmp_path):
    """Also one that the system ended, for its memory."""
    started.statuses = [status]
    assert command.main(["--out", str(tmp_path), "--model", MODEL]) == 1
    assert len(started.options) == 2, "the others are still measured"


# Results


def documented():
    """The names of a result and of its `trained`, by training.py's docstring."""
    about = training.__doc__
    [sentence] = re.findall(
        r"A result is the provenance of provenance.py, (.*?)\. Each of those is", about, re.DOTALL
    )
    words = re.sub(r"\(.*?\)", "", sentence.replace("of the loss curves", ""))
    names = {word for word in re.findall(r"\w+", words) if word != "and"}
    lines = re.findall(r"^([a-z]\w+(?:, \w+)*)  +\S", about, re.MULTILINE)
    return names, {name for line in lines for name in line.split(", ")}


def test_what_a_run_writes_is_what_its_page_says(tmp_path, capsys, monkeypatch):
    """Every name, and no other: on a CPU all but those of a profile, and uncompiled ones."""
    folder = tmp_path / "new"
    arguments = ("--out", str(folder), "--norm", "F.rms_norm,fused", "--steps", "8", "--sm-margin", "3")
    margins = []
    monkeypatch.setattr(command, "set_sm_margin", lambda given: margins.append(given))
    assert run(*arguments) == 0 and margins == [3]
    [path] = folder.iterdir()
    assert path.name == f"train-{MODEL}-eager-margin3.json"
    result = json.loads(path.read_text())
    top, of_way = documented()
    assert result.keys() - describe_run().keys() == top
    assert result["sizes"] == dataclasses.asdict(sizes_of(MODEL)) and result["is_tiny"]
    assert (result["model"], result["compiled"], result["sm_margin"]) == (MODEL, False, 3)
    assert (result["steps"], result["smoothed"], result["corpus_bytes"]) == (8, 4, [4000, 4000])
    assert result["norms_in_model"] == 9 and result["note"] and result["gpu"] is None
    assert result["flops_per_token"] == sizes_of(MODEL).flops_per_token
    assert result["versions"]["transformers"]
    first, second = result["trained"]
    assert (first["norm"], second["norm"]) == ("F.rms_norm", "fused")
    profiled = {*kernels.by_kind([], frozenset(), 1), "optimizer_ms"}
    assert first.keys() == of_way - profiled - {"graphs", "graph_breaks", "why_no_bits"}
    assert second.keys() == first.keys() - {"other_losses"}
    assert profiled < of_way
    assert len(first["losses"]) == len(first["other_losses"]) == len(second["losses"]) == 8
    assert not curves.disagreeing(result) and first["same_bits"] and second["same_bits"]
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"written: {path}" and training.section(result) in out
    assert training.read(folder) == [result] and f"{MODEL}" in training.table([result])


def test_one_way_that_raises_leaves_the_others_measured(tmp_path, monkeypatch, capsys):
    def broken(model):
        ways = ways_of(model)
        return ways | {"rms_norm": dataclasses.replace(ways["rms_norm"], build=lambda *_: 1 / 0)}

    monkeypatch.setattr(norms, "ways_of", broken)
    chosen = "F.rms_norm,rms_norm,residual"
    assert run("--out", str(tmp_path), "--steps", "6", "--norm", chosen) == 1
    [path] = tmp_path.iterdir()
    result = json.loads(path.read_text())
    assert [each["norm"] for each in result["trained"] if each["error"] is None] == ["F.rms_norm", "residual"]
    assert training.failures(result) == ["rms_norm: ZeroDivisionError: division by zero"]
    assert "rms_norm: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_a_loss_curve_of_another_model_fails_the_command(tmp_path, monkeypatch):
    """A norm with another eps, say: tokens/s of a model that learns something else."""

    def other(model):
        ways = ways_of(model)
        built = ways["rms_norm"].build
        build = lambda sizes, device: built(dataclasses.replace(sizes, eps=1.0), device)  # noqa: E731
        return ways | {"rms_norm": dataclasses.replace(ways["rms_norm"], build=build)}

    monkeypatch.setattr(norms, "ways_of", other)
    assert run("--out", str(tmp_path), "--norm", "F.rms_norm,rms_norm") == 1
    [result] = training.read(tmp_path)
    [line] = training.failures(result)
    assert line.startswith("rms_norm: its loss curve is ") and result["steps"] == command.TINY_STEPS


def test_the_margin_reaches_the_package(without_training, tmp_path):
    with pytest.raises(EndedError):
        run("--sm-margin", "8", "--out", str(tmp_path))
    assert settings.get_sm_margin() == 8
