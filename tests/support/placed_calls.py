# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of DTensors that are known, for scripts of several processes: what changes behind one must be seen."""

import contextlib

import pytest
import torch
import torch._dynamo  # noqa: F401  (a DTensor imports it; here once, before the processes are forked)
import torch.distributed._functional_collectives as collectives
from every_op import OPS, note_unknown
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.routes import choose, known_calls

SIZE, N, EPS = (8, 6, 16), 16, 1e-3
WHOLE, ROWS = Replicate(), Shard(0)


class Noted:
    """Note what no known call does, from now on: the checks, and the dispatch of an op to DTensor's engine."""

    def __init__(self, patch, ops=OPS[:2]):
        self.unknown = [note_unknown(op, patch) for op in ops]
        why_transformed = choose.why_transformed

        def noted(*tensors):  # each op asks it, at the dispatch key Autograd
            self.unknown[0].append("the engine")
            return why_transformed(*tensors)

        patch.setattr(choose, "why_transformed", noted)

    def take(self):
        found = [name for each in self.unknown for name in each]
        for each in self.unknown:
            each.clear()
        return found


@contextlib.contextmanager
def noting():
    with pytest.MonkeyPatch.context() as patch:
        yield Noted(patch)


def rows(seed=0, size=SIZE):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def made(mesh, at=ROWS, needs_grad=True, of_weight=WHOLE):
    """x, weight and dy."""
    placed = [at] * mesh.ndim if not isinstance(at, list) else at
    x, dy = (distribute_tensor(rows(seed), mesh, placed) for seed in (0, 1))
    weight = distribute_tensor(rows(2, (N,)) + 2, mesh, [of_weight] * mesh.ndim)
    # Not detached: the engine may return a DTensor of another mesh, which is equal.
    return x.requires_grad_(needs_grad), weight.requires_grad_(needs_grad), dy


def step(x, weight, dy, **options):
    results = rms_norm(x, N, weight, EPS, **options)
    several = results if isinstance(results, tuple) else (results,)
    if not any(each.requires_grad for each in several):
        return several
    leaves = [each for each in (x, weight) if each.requires_grad]
    return *several, *torch.autograd.grad(several, leaves, [dy] * len(several))


def described(tensor):
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if type(tensor) is not DTensor:
        return type(tensor), tensor.shape, tensor.dtype, None if tensor.is_meta else tensor.tolist()
    local = tensor._local_tensor
    of_both = [(t.shape, t.stride(), t.dtype, t.is_inference(), t.device) for t in (tensor, local)]
    node = None if tensor.grad_fn is None else tensor.grad_fn.name()
    values = local.tolist() if type(local) is torch.Tensor else collectives.wait_tensor(local).tolist()
    return tensor._spec, *of_both, tensor.requires_grad, local.requires_grad, node, values


def outcome(function, *given):
    """Describe the results of a call, or its error."""
    try:
        results = function(*given)
    except Exception as error:  # any: those of PyTorch too
        return type(error), str(error)[:60]
    return [described(each) for each in (results if isinstance(results, tuple) else (results,))]


def make_known(on, at=ROWS, **more):
    """Make both passes known, recorded and not, and return the tensors of a call. at: as of `made`."""
    known_calls.forget()
    with noting() as noted:
        for needs_grad in (False, True, False, True):
            given = made(on, at, needs_grad)
            noted.take()
            step(*given, **more)
        assert not noted.take(), "a call like the one before was run by DTensor's engine"
    return given


def assert_seen(mesh, change, at=ROWS, **more) -> list:
    """A call that is changed gets right behind a known one what it gets as the first. change: takes x, weight and dy.
    Return what the known call did not do."""
    given = make_known(mesh, at, **more)
    with noting() as noted:
        got = outcome(change, *given)
        found = noted.take()
    known_calls.forget()
    expected = outcome(change, *given)
    assert got == expected, (got, expected)
    return found
