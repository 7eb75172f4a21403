# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The programs of examples/ run on a CPU, as their docstrings say, and what they print means what they say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tilegym_rmsnorm.settings import AUTO_ORDER

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "examples").glob("*.py"))
INTERPRETERS = ("TILEGYM_RMSNORM_INTERPRET", "TRITON_INTERPRET")


def output_of(program: str, *arguments: str, has_gpu: bool = False) -> str:
    """Run it with a GPU or without, where nothing is set that it should set itself; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name not in INTERPRETERS}
    environment |= (
        {"OMP_NUM_THREADS": "1"} if has_gpu else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    )
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / program, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_train_llama_learns_as_with_the_model_s_own_norm():
    pytest.importorskip("transformers", reason="transformers is not installed")
    text = output_of("train_llama.py", "--steps", "20", "--layers", "1")
    assert "norms that this package runs: 3" in text
    theirs, ours = zip(
        *(map(float, row) for row in re.findall(r"^ *\d+ +(\d\.\d+) +(\d\.\d+)$", text, re.M)), strict=True
    )
    assert len(ours) == 3 and ours[-1] < ours[0] - 1
    assert ours == pytest.approx(theirs, abs=2e-3)


def test_finetune_hf_learns_as_without_the_patch(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    picture = tmp_path / "finetune.png"
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    text = output_of(
        "finetune_hf.py",
        *("--steps", "11", "--layers", "1", "--length", "32"),
        *(["--plot", str(picture)] if has_matplotlib else []),
    )
    assert "patched: 5\n" in text and "layers: 1\n" in text
    theirs, ours = zip(
        *(map(float, row) for row in re.findall(r"^ *\d+ +(\d\.\d+) +(\d\.\d+)$", text, re.M)), strict=True
    )
    assert len(ours) == 2 and ours[-1] < ours[0] - 0.5
    assert ours == pytest.approx(theirs, abs=2e-3)
    assert "tokens/s" not in text, "they were those of busy cores: 3,162 and 470 in one run"
    assert picture.exists() == has_matplotlib


@pytest.mark.parametrize("options", [[], ["--compile", "eager", "--steps", "12"]], ids=["eager", "compiled"])
def test_own_model_learns(options):
    """Compiled in one graph: a break would be an error. Dynamo's own backend, since Inductor takes a minute."""
    text = output_of("own_model.py", *options)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", text)]
    assert text.startswith("norms: 9\n") and len(losses) == 2 and losses[1] < losses[0] - 1


def test_step_through_kernel_stops_in_the_kernel_that_it_names():
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    named = re.search(
        r"This stops in the kernel `(\w+)`", (ROOT / "examples/step_through_kernel.py").read_text()
    )
    text = output_of("step_through_kernel.py")
    assert f"kernels{os.sep}forward.py" in text and f"{named[1]}()\n-> store_rstd_at(rstd" in text
    rows = [[value] * 4 for value in (1.0, 2.0, 4.0)]
    assert f"(Pdb) p tx[0]\nTile[float32,(64, 4)] {str(rows)[:-1]}" in text
    rstd = re.search(r"\(Pdb\) p trstd\nTile\[float32,\(64, 1\)\] \[\[(.*?)\], \[(.*?)\], \[(.*?)\]", text)
    assert [float(each) for each in rstd.groups()] == pytest.approx([1, 0.5, 0.25], rel=1e-5)
    assert text.splitlines()[-3].startswith("y: tensor([[1.0000, 1.0000")


@pytest.mark.parametrize("has_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_two_kernels_has_small_errors(has_gpu):
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    lines = output_of("two_kernels.py", has_gpu=has_gpu).splitlines()
    errors = [float(error) for line in lines for error in re.findall(r"\d\.\de-\d\d", line)]
    assert len(lines) == 3 and len(errors) == 9 and all(0 < error < 4e-3 for error in errors)


def test_compare_backends_has_a_line_of_small_errors_for_each():
    text = output_of("compare_backends.py")
    rows = re.findall(r"^(\w+) +(\S+e\S+) +(\S+e\S+) +(\S+e\S+)$", text, re.M)
    found = {name: list(map(float, errors)) for name, *errors in rows}
    why_not = re.findall(r"^(\w+) +not usable: .+$", text, re.M)
    assert sorted([name for name, *_ in rows] + why_not) == sorted(AUTO_ORDER) and "torch" in found
    assert all(0 < error < 8e-3 for errors in found.values() for error in errors)  # bfloat16's rounding
    if importlib.util.find_spec("cuda.tile") is not None:
        assert "cutile" in found
    assert " us" not in text, "times of busy cores"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_each_says_how_to_run_it_and_what_it_prints(program):
    text = program.read_text(encoding="utf-8")
    docstring = text.split('"""')[1]
    assert f"python examples/{program.name}" in docstring and "print" in docstring
    assert len(text.splitlines()) <= (150 if program.stem == "two_kernels" else 90)
