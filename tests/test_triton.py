# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": every branch of its kernels, and when it says that it is unusable.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    FP64,
    HAS_GPU,
    assert_within,
    expected_results,
    make_inputs,
    why_skip,
)

from tilegym_rmsnorm.backends import checks
from tilegym_rmsnorm.backends import triton as backend
from tilegym_rmsnorm.backends.triton.config import BackwardConfig, ForwardConfig
from tilegym_rmsnorm.registry import Request

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
needs_kernels = pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton")))

# 13 rows of 100 (or 96) columns, in every way that the kernels know
FORWARDS = {
    "one row": ForwardConfig(True, rows=1, width=128, tiles=1, num_warps=4),
    "rows per tile": ForwardConfig(True, rows=8, width=128, tiles=1, num_warps=4),
    "tiles per row": ForwardConfig(True, rows=4, width=32, tiles=4, num_warps=4),
    "chunks": ForwardConfig(False, rows=1, width=32, tiles=4, num_warps=4),
}
_HELD = BackwardConfig(
    "held",
    walks=3,
    rows=1,
    width=128,
    tiles=1,
    num_warps=4,
    num_stages=2,
    dw_rows=16,
    dw_width=64,
    dw_num_warps=4,
)
BACKWARDS = {
    "one row": _HELD,
    "a walk per row": dataclasses.replace(_HELD, walks=13),
    "one walk": dataclasses.replace(_HELD, walks=1),
    "rows per tile": dataclasses.replace(_HELD, rows=4),
    "walks without rows": dataclasses.replace(_HELD, rows=8, walks=5),
    "tiles per row": dataclasses.replace(_HELD, rows=2, width=32, tiles=4),
    "reread": dataclasses.replace(_HELD, plan="reread", width=32, tiles=4),
    "strips": dataclasses.replace(_HELD, plan="strips", rows=2, width=32, tiles=4),
    "strips of one row": dataclasses.replace(_HELD, plan="strips", width=32, tiles=4),
}


def _padded(x):
    return torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, : x.shape[1]]


def _storage_offset_1(x):
    return torch.cat([torch.full_like(x[0, :1], torch.nan), x.reshape(-1)])[1:].view(x.shape)


CASES = {
    "contiguous": (lambda x: x, 100, BF16, FP32, "once", 1.0),
    "row stride": (_padded, 96, FP32, FP32, "once", 0.0),
    "storage offset": (_storage_offset_1, 100, FP16, FP16, "llama", -0.25),
    "llama": (_padded, 100, BF16, BF16, "llama", 0.0),
    "no weight": (lambda x: x, 96, BF16, None, "llama", 1.0),
}


def _case(name):
    layout, n, dtype, weight_dtype, casting, offset = CASES[name]
    inputs = make_inputs(13, n, dtype, weight_dtype, offset=offset, casting=casting)
    return inputs, expected_results(inputs), layout(inputs.x), layout(inputs.dy)


@needs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name, case):
    from tilegym_rmsnorm.backends.triton import launch

    inputs, expected, x, _ = _case(case)
    call = (inputs.weight, inputs.eps, inputs.offset, inputs.casting)
    y, rstd = launch.launch_forward(FORWARDS[name], x, *call)
    assert_within(expected, y=y, rstd=rstd)


@needs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(name, case):
    from tilegym_rmsnorm.backends.triton import launch

    inputs, expected, x, dy = _case(case)
    call = (x, dy, inputs.weight, expected["rstd"].truth.float(), inputs.offset, inputs.casting)
    dx, dw = launch.launch_backward(BACKWARDS[name], *call, needs_dw=True)
    dx_alone, no_dw = launch.launch_backward(BACKWARDS[name], *call, needs_dw=False)

    assert_within(expected, dx=dx)
    assert_within(expected, dx=dx_alone)  # another compilation: not bit for bit
    assert no_dw is None
    if inputs.weight is None:
        assert dw is None
    else:
        assert_within(expected, dw=dw)


@needs_kernels
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("name", BACKWARDS)
def test_same_bits_twice(name):
    from tilegym_rmsnorm.backends.triton import launch

    inputs = make_inputs(13, 100, BF16, FP32)
    rstd = expected_results(inputs)["rstd"].truth.float()
    arguments = (inputs.x, inputs.dy, inputs.weight, rstd, 0.0, "once", True)
    dx, dw = launch.launch_backward(BACKWARDS[name], *arguments)
    for _ in range(3):
        again_dx, again_dw = launch.launch_backward(BACKWARDS[name], *arguments)
        assert torch.equal(dx, again_dx) and torch.equal(dw, again_dw)


@needs_kernels
def test_results_are_rounded_to_nearest_even():
    """Triton's own interpreter truncates to bfloat16, a bias towards zero in every result."""
    from tilegym_rmsnorm.backends.triton import launch

    weight = torch.randn(128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight[:3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, torch.nan])  # ties to even, down and up
    ones = torch.ones(1, 128, dtype=BF16, device=DEVICE)  # rstd is 1, y the rounded weight
    y, _ = launch.launch_forward(FORWARDS["one row"], ones, weight, 0.0, 0.0, "once")
    torch.testing.assert_close(y[0], weight.to(BF16), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.skipif(HAS_GPU, reason="the interpreter runs where there is no GPU")
def test_the_interpreter_is_changed_once_for_all_threads():
    """Triton interprets with globals: two launches at once would each run programs of the other's number."""
    from triton.runtime.interpreter import InterpreterBuilder

    from tilegym_rmsnorm.backends.triton import launch

    inputs = make_inputs(13, 100, BF16, FP32)
    call = (FORWARDS["one row"], inputs.x, inputs.weight, inputs.eps, 0.0, "once")
    expected = launch.launch_forward(*call)
    cast = InterpreterBuilder.cast_impl
    with ThreadPoolExecutor(4) as threads:
        for results in threads.map(lambda _: launch.launch_forward(*call), range(12)):
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert InterpreterBuilder.cast_impl is cast


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
REQUEST = Request(CUDA, BF16, FP32, "once", False)


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
        (REQUEST._replace(has_bias=True), "bias", 'backend="torch"'),
        (REQUEST._replace(dtype=FP64), "torch.float64", 'backend="torch"'),
        (REQUEST._replace(weight_dtype=FP16), "torch.float16", 'backend="torch"'),
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
    monkeypatch.setattr(checks, "package_version", {"triton": "3.9", "numpy": "2.4"}.get)
    assert backend.unusable(REQUEST._replace(device=CPU)) is None
    assert backend.unusable(None) is None
    assert not backend.AUTO_ON_CPU


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
    monkeypatch.setattr(checks, "package_version", {"triton": triton, "numpy": numpy}.get)
    for request in (None, REQUEST._replace(device=CPU)):
        unusable = backend.unusable(request)
        assert (unusable and unusable.remedy) == remedy
        assert unusable is None or unusable.reason.endswith("Triton 3.6 does not work with numpy 2.4")


def test_an_interpreter_without_numpy_says_so(machine, monkeypatch):
    machine(is_interpreting=True)
    monkeypatch.setattr(checks, "is_installed", lambda package: package != "numpy")
    assert backend.unusable(None).remedy == "pip install numpy"


def test_the_version_of_a_distribution():
    found = checks.parse_version(checks.package_version("torch"))
    assert found[:2] == tuple(map(int, torch.__version__.split(".")[:2]))
    assert checks.package_version("no-such-thing") is None


def test_without_triton_it_says_what_to_install(machine):
    machine((9, 0), has_triton=False)
    for request in (None, REQUEST):
        assert backend.unusable(request).remedy == "pip install triton"


def test_a_folder_called_triton_is_not_triton(machine, monkeypatch):
    machine((9, 0))
    folder = importlib.machinery.ModuleSpec(
        "triton", None, is_package=True
    )  # a namespace package has no origin
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    assert backend.unusable(REQUEST).reason == "triton is not installed"


def test_asking_does_not_import_triton():
    code = (
        "import sys, tilegym_rmsnorm.backends.triton as b; b.unusable(None); print('triton' in sys.modules)"
    )
    assert _python(code) == "False"


@needs_kernels
@pytest.mark.parametrize(("at_import", "later", "expected"), [("1", "0", "True"), ("0", "1", "False")])
def test_interpreting_is_what_triton_was_imported_with(at_import, later, expected):
    code = (
        "import os, triton; from tilegym_rmsnorm.backends.triton import interpreting; "
        f"os.environ['TRITON_INTERPRET'] = '{later}'; print(interpreting())"
    )
    assert _python(code, TRITON_INTERPRET=at_import) == expected


def _python(code, **environment):
    """What a fresh process prints."""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[1]
    done = subprocess.run(
        command, env=os.environ | environment, cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
