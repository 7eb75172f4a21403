# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": when it says that it is unusable, and why."""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import BF16, FP16, FP32, FP64, why_skip

from tilegym_rmsnorm.backends import triton as backend
from tilegym_rmsnorm.backends import versions
from tilegym_rmsnorm.backends.registry import Request

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
REQUEST = Request(CUDA, BF16, FP32, "once")


@pytest.fixture
def machine(monkeypatch):
    """Sets what `unusable` finds: Triton or not, its interpreter or not, GPUs of these compute capabilities."""

    def set_machine(*capabilities, has_triton=True, is_interpreting=False):
        monkeypatch.setattr(backend, "interpreting", lambda: is_interpreting)
        find_spec = importlib.util.find_spec
        hidden = None if has_triton else "triton"
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name == hidden else find_spec(name, *a)
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")

    caches = (backend._triton_unusable, backend._interpreter_unusable, backend._gpu_unusable)
    for cached in caches:
        cached.cache_clear()
    yield set_machine
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    "request_", [None, REQUEST, REQUEST._replace(weight_dtype=None, dtype=FP32, casting="llama")]
)
def test_usable_with_a_gpu(machine, request_):
    machine((9, 0))
    assert backend.unusable(request_) is None


@pytest.mark.parametrize(
    ("request_", "reason", "remedy"),
    [
        (
            REQUEST._replace(other_dtypes=(FP16, FP64)),
            "results of float16, bfloat16 or float32, not torch.float64",
            'backend="torch"',
        ),
        (REQUEST._replace(dtype=FP64), "torch.float64", 'backend="torch"'),
        (REQUEST._replace(weight_dtype=FP64), "torch.float64", 'backend="torch"'),
        (REQUEST._replace(device=CPU), "CPU", "TRITON_INTERPRET=1"),
        (REQUEST._replace(device=torch.device("meta")), "meta", 'backend="torch"'),
        (
            REQUEST._replace(device=torch.device("cuda", 1)),
            "A GPU has compute capability 7.5",
            'backend="torch"',
        ),
    ],
)
def test_tensors_that_it_cannot_take(machine, request_, reason, remedy):
    machine((9, 0), (7, 5))
    unusable = backend.unusable(request_)
    assert reason in unusable.reason and remedy in unusable.remedy


def test_without_a_gpu_it_runs_interpreted_only(machine, monkeypatch):
    machine()
    for request in (None, REQUEST._replace(device=CPU)):
        assert "TRITON_INTERPRET=1" in backend.unusable(request).remedy
    machine(is_interpreting=True)
    monkeypatch.setattr(versions, "package_version", {"triton": "3.9", "numpy": "2.4"}.get)
    assert backend.unusable(REQUEST._replace(device=CPU)) is None
    assert backend.unusable(None) is None


@pytest.mark.parametrize(
    ("triton", "numpy", "remedy"),
    [
        ("3.6", "2.4", 'pip install "numpy<2.4"'),
        ("3.6", "2.3.5", None),
        ("3.7.1+git", "2.4.6", None),
        (None, "2.4", None),  # another distribution of it, such as triton-windows
    ],
)
def test_versions_that_cannot_interpret(machine, monkeypatch, triton, numpy, remedy):
    machine(is_interpreting=True)
    monkeypatch.setattr(versions, "package_version", {"triton": triton, "numpy": numpy}.get)
    for request in (None, REQUEST._replace(device=CPU)):
        unusable = backend.unusable(request)
        assert (unusable and unusable.remedy) == remedy
        assert unusable is None or unusable.reason.endswith("Triton 3.6 does not work with numpy 2.4")


def test_an_interpreter_without_numpy_says_so(machine, monkeypatch):
    machine(is_interpreting=True)
    monkeypatch.setattr(versions, "is_installed", lambda package: package != "numpy")
    assert backend.unusable(None).remedy == "pip install numpy"


def test_the_version_of_a_distribution():
    found = versions.parse_version(versions.package_version("torch"))
    assert found[:2] == tuple(map(int, torch.__version__.split(".")[:2]))
    assert versions.package_version("no-such-thing") is None


def test_without_triton_it_says_what_to_install(machine):
    machine((9, 0), has_triton=False)
    for request in (None, REQUEST):
        assert backend.unusable(request).remedy == "pip install triton"
    machine(has_triton=False, is_interpreting=True)
    for request in (None, REQUEST._replace(device=CPU)):
        assert backend.unusable(request).remedy == "pip install triton"


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("cuda", ["13.0", None])
def test_without_a_gpu_that_is_said_first(machine, monkeypatch, has_triton, cuda):
    """Installing Triton would not have helped, nor would moving the tensors."""
    machine(has_triton=has_triton)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    here = backend.unusable(None)
    assert here.reason == ("PyTorch sees no GPU" if cuda else "this PyTorch is built without CUDA")
    of_tensors = backend.unusable(REQUEST._replace(device=CPU))
    assert of_tensors.reason == "it runs on CUDA tensors, these are on the CPU"
    assert f" ({here.reason}), or " in of_tensors.remedy
    mends = "check nvidia-smi" if cuda else "install a CUDA build of PyTorch, as https://pytorch.org/"
    for problem in (here, of_tensors):
        assert problem.remedy.startswith(mends)
        assert ("pip install triton, and set TRITON_INTERPRET=1" in problem.remedy) is not has_triton
        assert "set TRITON_INTERPRET=1 before Python starts" in problem.remedy


def test_a_folder_called_triton_is_not_triton(machine, monkeypatch):
    machine((9, 0))
    # A namespace package has no origin.
    folder = importlib.machinery.ModuleSpec("triton", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    assert backend.unusable(REQUEST).reason == "triton is not installed"


def test_asking_does_not_import_triton():
    code = (
        "import sys, tilegym_rmsnorm.backends.triton as b; b.unusable(None); print('triton' in sys.modules)"
    )
    assert _python(code) == "False"


@pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton")))
@pytest.mark.parametrize(("at_import", "later", "expected"), [("1", "0", "True"), ("0", "1", "False")])
def test_interpreting_is_what_triton_was_imported_with(at_import, later, expected):
    code = (
        "import os, triton; from tilegym_rmsnorm.backends.triton import interpreting; "
        f"os.environ['TRITON_INTERPRET'] = '{later}'; print(interpreting())"
    )
    assert _python(code, TRITON_INTERPRET=at_import) == expected


@pytest.mark.parametrize(
    "value", ["1", "true", "on", "yes", "y", "ON", "Y", "0", "false", "off", "no", "n", "maybe", " 1", ""]
)
def test_before_triton_is_imported_its_variable_is_read_as_triton_reads_it(monkeypatch, value):
    knobs = pytest.importorskip("triton.knobs", reason="triton is not installed, or keeps no knobs")
    monkeypatch.setenv("TRITON_INTERPRET", value)
    monkeypatch.delitem(sys.modules, "triton.language", raising=False)
    assert backend.interpreting() is knobs.runtime.interpret


def _python(code, **environment):
    """Return a fresh process's output."""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
