# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What backend "inductor" compiles, and how often."""

import importlib.machinery
import importlib.util

import pytest
import torch
from helpers import BF16, DEVICE, FP32, make_inputs, why_skip
from torch._dynamo.utils import counters

from tilegym_rmsnorm import registry, rms_norm_backward, rms_norm_forward

pytestmark = pytest.mark.skipif(why_skip("inductor") is not None, reason=str(why_skip("inductor")))


def _compilations(call) -> int:
    before = counters["stats"]["unique_graphs"]
    call()
    return counters["stats"]["unique_graphs"] - before


def _forward(m, n, **options):
    x, dy, weight, eps, *_ = make_inputs(m, n, BF16, FP32)
    return rms_norm_forward(x, weight, options.pop("eps", eps), backend="inductor", **options)


def test_batch_sizes_eps_and_offsets_share_a_compilation():
    def both(m, eps, offset):
        x, dy, weight, *_ = make_inputs(m, 48, BF16, FP32)
        _, rstd = rms_norm_forward(x, weight, eps, offset=offset, backend="inductor")
        rms_norm_backward(x, dy, weight, rstd, offset=offset, backend="inductor")

    assert _compilations(lambda: both(5, 1e-6, 0.5)) == 2
    for m, eps, offset in ((6, 1e-6, 0.5), (2, 1e-5, 0.5), (131, 1e-3, 0.25), (1000, 1e-6, 2.0)):
        assert _compilations(lambda m=m, eps=eps, offset=offset: both(m, eps, offset)) == 0


def test_widths_do_not_use_up_the_limit_of_recompilations():
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (40, 41, 42):
            assert _compilations(lambda n=n: _forward(5, n)) == 1


def test_one_compilation_serves_every_mode():
    """torch.compile guards on grad mode and autocast: nine of their combinations, and it gives up after eight."""
    _forward(5, 56)
    for grad_mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for dtype in (None, BF16, torch.float16):
            with grad_mode(), torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
                assert _compilations(lambda: _forward(5, 56)) <= (grad_mode is torch.inference_mode)


def test_the_callers_tensors_are_not_marked():
    x = torch.ones(5, 48, device=DEVICE)
    rms_norm_forward(x, None, backend="inductor")
    assert not [name for name in vars(x) if "dynamo" in name]


def test_a_folder_called_triton_is_not_triton(monkeypatch):
    # A namespace package has no origin.
    folder = importlib.machinery.ModuleSpec("triton", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    request = registry.Request(torch.device("cuda", 0), FP32, FP32, "once")
    assert registry.why_unusable("inductor", request).remedy == "pip install triton"


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    request = registry.Request(torch.device("cpu"), FP32, FP32, "once")
    unusable = registry.why_unusable("inductor", request)
    assert "no-such-compiler" in unusable.reason and "CXX" in unusable.remedy
