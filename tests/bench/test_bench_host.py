# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The command that times the host."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
import torch

from bench.studies import host
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE


def test_every_call_and_slice_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv(CACHE_VARIABLE)
    assert host.main(["--backend", "torch", "--rows", "4", "--columns", "16", "--samples", "3"]) == 0
    assert os.environ[CACHE_VARIABLE] == "off", "what somebody tuned is not what this package is"
    out = capsys.readouterr().out
    for line in ("forward", "forward, no_grad", "backward", "backward, the node alone", "both"):
        found = re.findall(rf"^{line}(?: +\d+\.\d \( *\d+\.\d\)){{3}}$", out, re.MULTILINE)
        assert len(found) == 2, f"{line}: {out}"
    for line in ("find a known call", "forward below autograd", "backward below autograd"):
        assert re.search(rf"^{line} +\d+\.\d", out, re.MULTILINE), out


def test_a_node_of_several_outputs_runs_alone():
    """F.rms_norm's on a GPU has y and rstd."""
    x = torch.randn(1, 3, 8, requires_grad=True)
    y = torch.native_group_norm(x, None, None, 1, 3, 8, 1, 1e-5)[0]
    dx = host.node_alone(y, torch.ones_like(y))()[0]
    assert torch.equal(dx, torch.autograd.grad(y, x, torch.ones_like(y))[0])


def test_a_backend_that_cannot_run_here_is_named_with_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TILEGYM_RMSNORM_INTERPRET", raising=False)
    assert host.main([]) == 1
    assert re.match("cutile: it runs on CUDA tensors.*To mend it: ", capsys.readouterr().err)


def test_first_calls_are_timed_twice_with_one_cache(capsys, monkeypatch):
    """Both processes are this one here: the second finds what the first has compiled."""
    caches, start = [], subprocess.run

    def run(command, **options):
        if list(command[:3]) != [sys.executable, "-m", "bench.studies.host"]:  # git
            return start(command, **options)
        caches.append(options["env"]["CUDA_TILE_CACHE_DIR"])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = host.main(command[3:])
        return subprocess.CompletedProcess(command, status, out.getvalue(), "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host.subprocess, "run", run)
    assert host.main(["--backend", "torch", "--first-call", "64"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"N = +64 .* forward +\d+\.\d\d s   backward +\d+\.\d\d s", out)) == 2
    assert len(caches) == 2 and caches[0] == caches[1]


def test_without_launches_puts_ct_launch_back():
    machine = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine")
    launch, seen = machine.launch_kernel, []

    def call():
        seen.append(machine.launch_kernel)
        raise KeyError

    with pytest.raises(KeyError):
        host.without_launches(call)()
    assert seen == [host._launch_nothing] and machine.launch_kernel is launch
