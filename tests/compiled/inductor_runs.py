# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the tests of backend "inductor" share: a norm, what it warns of, and whether it ran compiled."""

import warnings

import torch
from helpers import FP32, assert_within, expected_results, make_inputs
from torch.overrides import TorchFunctionMode

from tilegym_rmsnorm import rms_norm, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends import inductor

WIDTH = 72  # one for all, so that Inductor finds in its cache what another test compiled


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Norm:
    """Both passes over one input, as autograd calls them or as functions, compared with float64."""

    def __init__(self):
        self.inputs = make_inputs(5, WIDTH, FP32, FP32)
        self.expected = expected_results(self.inputs, running_sum=True)

    def train(self):
        x, dy, weight, eps, *_ = self.inputs
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = rms_norm(x, x.shape[1:], weight, eps, backend="inductor")
        y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}

    def call(self):
        x, dy, weight, eps, *_ = self.inputs
        y, rstd = rms_norm_forward(x, weight, eps, backend="inductor")
        dx, dw = rms_norm_backward(x, dy, weight, rstd, backend="inductor")
        return {"y": y, "rstd": rstd, "dx": dx, "dw": dw}

    def check(self, run=None):
        """The warnings of a run that is right."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = (run or self.train)()
        assert_within(self.expected, **results)
        return [str(warning.message) for warning in caught if "inductor" in str(warning.message)]

    def is_compiled(self, run=None):
        """Whether neither pass runs the reference's operations, once it had the time to be compiled."""
        assert not self.check(run)
        activity = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[activity]) as profile:
            assert not self.check(run)
        return "aten::mean" not in {event.name for event in profile.events()}


def uncompiled():
    """A norm that shares nothing with earlier tests: Dynamo compiles for eight states of a process, and each mode may
    be one more."""
    inductor._program.cache_clear()
    return Norm()
