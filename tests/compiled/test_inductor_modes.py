# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "inductor" under PyTorch's modes: right values, and later calls as if nothing had been."""

import os
import subprocess
import sys

import pytest
import torch
from helpers import DEVICE, why_skip
from inductor_runs import Passing, uncompiled
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tilegym_rmsnorm import rms_norm

pytestmark = pytest.mark.skipif(why_skip("inductor") is not None, reason=str(why_skip("inductor")))


class Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


DISPATCH_MODES = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "_AllowMutationOnSavedContext": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "Seeing": Seeing,
}


@pytest.mark.parametrize("mode", DISPATCH_MODES)
def test_a_dispatch_mode_breaks_no_later_call(mode):
    """Each later call of that width failed."""
    norm = uncompiled()
    assert not norm.check()
    with DISPATCH_MODES[mode]():
        assert norm.is_compiled()
    assert norm.is_compiled()


# Torch 2.9 asks a flag of the process, which hiding a mode does not change; 2.11 asks the stack of modes.
not_on_torch_2_9 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.11",
    reason="Dynamo of torch 2.9 never compiles what it first sees under a dispatch mode: the reference serves there",
)


@not_on_torch_2_9
def test_a_first_call_under_a_dispatch_mode_breaks_no_later_one():
    norm = uncompiled()
    with FlopCounterMode(display=False):
        assert not norm.check()
    assert norm.is_compiled()


def test_a_dispatch_mode_does_not_see_what_is_compiled():
    """No more than it sees of a kernel: Dynamo would refuse."""
    norm, seen = uncompiled(), []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Listing():
        norm.check()
    assert seen and "aten.rsqrt.default" not in seen


@not_on_torch_2_9
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_selective_checkpointing(policy):
    norm = uncompiled()

    def train():
        x, dy, weight, eps, *_ = norm.inputs
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = checkpoint(
            lambda x, weight: rms_norm(x, x.shape[1:], weight, eps, backend="inductor"),
            x,
            weight,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(lambda *_, **__: policy),
        )
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}

    assert norm.is_compiled(train)


MODES = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t),
    "one thread of autograd": lambda: torch.autograd.set_multithreading_enabled(False),
    "a device": lambda: torch.device(DEVICE.type),
    "a function mode": Passing,
    "force_eager": lambda: torch.compiler.set_stance("force_eager"),
    "eager_on_recompile": lambda: torch.compiler.set_stance("eager_on_recompile"),
    "fail_on_recompile": lambda: torch.compiler.set_stance("fail_on_recompile"),
    "error_on_recompile": lambda: torch._dynamo.config.patch(error_on_recompile=True),
    "disable": lambda: torch._dynamo.config.patch(disable=True),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    norm = uncompiled()
    norm.check()
    with MODES[mode]():
        assert not norm.check()
    assert norm.is_compiled()


def test_in_code_that_dynamo_leaves_alone():
    norm = uncompiled()
    assert not norm.check(torch._dynamo.disable(norm.train))
    assert not norm.check(torch.compiler.disable(norm.train))
    assert norm.is_compiled()


def test_dynamo_disabled_for_a_while():
    norm = uncompiled()
    with torch._dynamo.config.patch(disable=True):
        norm.check()
        assert not norm.check()
    assert not norm.check()


def test_dynamo_disabled_by_the_environment():
    program = (
        f"import torch, tilegym_rmsnorm as t; x = torch.randn(3, 8, device='{DEVICE.type}');"
        "y, r = t.rms_norm_forward(x, None, backend='inductor');"
        "torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,)));"
        "dx, _ = t.rms_norm_backward(x, x, None, r, backend='inductor');"
        "e, _ = t.rms_norm_backward(x, x, None, r, backend='torch');"
        "torch.testing.assert_close(dx, e)"
    )
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1"}
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True, env=environment)


def test_fx_traces_around_it():
    norm = uncompiled()

    class Module(torch.nn.Module):
        def forward(self, x):
            told.extend(norm.check(norm.call))
            return x

    told = []
    torch.fx.symbolic_trace(Module())
    assert len(told) == 2 and "FX" in told[0]
    assert norm.is_compiled(norm.call)
