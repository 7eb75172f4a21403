# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Commands as they are called, `python -m tilegym_rmsnorm`, and the first call of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import why_skip
from torch.torch_version import TorchVersion

from tilegym_rmsnorm.commands import doctor

ROOT = Path(__file__).resolve().parents[2]


def test_kernels_of_the_reference_run_in_a_process_of_their_own():
    result = doctor.run_kernels_apart("torch")

    assert result["works"], result
    assert set(result["errors"]) == {"y", "rstd", "dx", "dw"}
    assert all(0 < error < doctor.TOLERANCE for error in result["errors"].values())


@pytest.mark.parametrize("options", [(), ("--json", "--backend", "torch")])
def test_reader_that_leaves_early_gets_no_traceback(options):
    """`python -m tilegym_rmsnorm doctor | head -1`. What --json prints is written as the command ends."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tilegym_rmsnorm", "doctor", *options],
            cwd=ROOT,
            stdout=write,
            stderr=subprocess.PIPE,
        )
    finally:
        os.close(write)
    assert done.returncode == 141 and not any(word in done.stderr for word in (b"Traceback", b"BrokenPipe"))


def test_no_command_is_a_usage_error():
    answer = subprocess.run(
        [sys.executable, "-m", "tilegym_rmsnorm"], cwd=ROOT, capture_output=True, text=True
    )

    assert answer.returncode == 2
    assert "usage: python -m tilegym_rmsnorm" in answer.stderr and "Traceback" not in answer.stderr


def test_without_numpy_a_command_prints_no_warning_of_torch(tmp_path):
    """PyTorch warns while it is imported, above the first line of doctor's report."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['numpy'] = None\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def said(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stderr

    if "Failed to initialize NumPy" not in said("-c", "import tilegym_rmsnorm"):
        pytest.skip("this PyTorch does not warn")
    assert said("-m", "tilegym_rmsnorm", "doctor", "--backend", "torch") == ""


def test_a_command_of_others_keeps_its_filters_of_warnings(tmp_path):
    """While `python -m other` imports the package other, sys.argv is that of a command of ours."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "__init__.py").write_text(
        "import sys, warnings\n"
        "assert sys.argv[0] == '-m'\n"
        "import tilegym_rmsnorm\n"
        "print(any('NumPy' in getattr(each[1], 'pattern', '') for each in warnings.filters))\n"
    )
    (tmp_path / "other" / "__main__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "other"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# torch 2.11 traces no import, so the reference has to be there before.
TRACED = """
import torch, tilegym_rmsnorm
norm = torch.compile(tilegym_rmsnorm.rms_norm, backend="eager", fullgraph=True)
x = torch.ones(2, 8, requires_grad=True)
norm(x, (8,), torch.ones(8), backend="torch").sum().backward()
assert x.grad is not None
"""
IN_A_REGION = """
import torch, tilegym_rmsnorm
region = torch.compiler.nested_compile_region(
    lambda x: tilegym_rmsnorm.rms_norm(x, (8,), None, 1e-6, residual=x)[0]
)
x = torch.randn(3, 8)
y = torch.compile(lambda x: region(region(x)), backend="eager", fullgraph=True)(x)
once = torch.nn.functional.rms_norm(2 * x, (8,), None, 1e-6)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(2 * once, (8,), None, 1e-6))
"""
X = "torch.arange(24.0).view(3, 8).sin()"
FIRST_CALLS = {
    "rms_norm_forward": "tr.rms_norm_forward(x, w, 1e-6)[0]",
    "rms_norm_backward": "tr.rms_norm_backward(x, x, w, rstd)[0]",
    "forward op": "ops.rms_norm_forward(x, None, w, None, 1, 1e-6, 0.0, 'once', 1.0, None, None, None)[0]",
    "backward op": "ops.rms_norm_backward(x, x, w, rstd[:, None], None, 3, 1, 0.0, 'once', 1.0, *[None] * 5)[0]",
    "with a residual": "tr.rms_norm(x, 8, w, 1e-6, residual=x)[0]",
    "with rotary embedding": "tr.rms_norm_rope(x[:, None], w, x.detach(), x.detach(), eps=1e-6)",
}
SURROUNDINGS = {
    "eager": "call(x, w, rstd)",
    "torch.jit.trace": "torch.jit.trace(call, (x, w, rstd), check_trace=False)(x, w, rstd)",
    "torch.compile": "torch.compile(call, backend='aot_eager', fullgraph=True)(x, w, rstd)",
}

# Forked, so that torch is imported once, and from the first program that compiles on also what torch compiles with:
# no backward runs here, or PyTorch would refuse those of forked processes.
CHILDREN = """
import os, sys, torch
for program in sys.argv[1:]:
    if "torch.compile" in program and "torch._functorch.partitioners" not in sys.modules:
        torch.compile(torch.sin, backend="aot_eager")(torch.ones(1, requires_grad=True))
        assert "torch._functorch.partitioners" in sys.modules and "tilegym_rmsnorm" not in sys.modules
    if (child := os.fork()) == 0:
        exec(program)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def run_each(programs, **more):
    command = [sys.executable, "-W", "ignore", "-c", CHILDREN, *programs]
    subprocess.run(command, check=True, env=os.environ | more)


@needs_fork
def test_the_first_call_of_a_process_may_be_any():
    """Each in a process of its own, with the values that a process gets that has made calls before."""
    programs = [
        f"""
import tilegym_rmsnorm as tr
ops, x, w = torch.ops.tilegym_rmsnorm, {X}, torch.linspace(0.5, 2, 8)
rstd = torch.rsqrt(x.square().mean(1) + 1e-6)
call = lambda x, w, rstd: {call}
y = {surrounding}
torch.testing.assert_close(y, call(x, w, rstd))
"""
        for surrounding in SURROUNDINGS.values()
        for call in FIRST_CALLS.values()
    ]
    programs.append(TRACED)
    if TorchVersion(torch.__version__) >= "2.11":  # regions are tested from there on
        programs.append(IN_A_REGION)
    run_each(programs)


@needs_fork
def test_the_first_call_of_a_process_may_be_a_kernel_with_rotary_embedding():
    """Interpreters run both passes on a CPU."""
    backends = [each for each in ("cutile", "triton") if not why_skip(each, torch.device("cpu"))]
    if not backends:
        pytest.skip("neither cutile nor triton can run on a CPU here")
    run_each(
        (
            f"""
import tilegym_rmsnorm as tr
x = {X}[:, None].requires_grad_()
w, table = torch.linspace(0.5, 2, 8).requires_grad_(), {X}
call = lambda x, w, backend: tr.rms_norm_rope(x, w, table, table, eps=1e-6, backend=backend)
y = ({surrounding})(x, w, {backend!r})
got = y, *torch.autograd.grad(y, (x, w), x.detach())
y = call(x, w, "torch")
for one, other in zip(got, (y, *torch.autograd.grad(y, (x, w), x.detach())), strict=True):
    torch.testing.assert_close(one, other)
"""
            for surrounding in ("call", "torch.compile(call, backend='aot_eager', fullgraph=True)")
            for backend in backends
        ),
        TILEGYM_RMSNORM_INTERPRET="1",
        TRITON_INTERPRET="1",
    )
