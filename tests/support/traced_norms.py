# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Graphs with aten's fused norms in them, of any device.

On a CPU PyTorch decomposes `aten._fused_rms_norm` before a tracer sees it. With kernels of that device it stays whole,
and derivatives.yaml differentiates it as on a GPU.
"""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tilegym_rmsnorm.ops.norm import reference

FORWARD = torch.ops.aten._fused_rms_norm.default
BACKWARD = torch.ops.aten._fused_rms_norm_backward.default
# torch 2.9 knows the shapes of a forward by decomposing it alone.
KEEPS_FORWARDS = FORWARD in torch._decomp.decomposition_table


@pytest.fixture(scope="module")
def fused_norms() -> Iterator[None]:
    """aten's fused norms have kernels of the CPU, which are the reference. conftest.py has pytest load this file."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", _forward, "CPU")
        library.impl("_fused_rms_norm_backward", _backward, "CPU")
        yield
    for op in (FORWARD, BACKWARD):
        op._dispatch_cache.clear()  # which a tracer has filled, and nobody empties


def _forward(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    dims = len(shape)
    flat = None if weight is None else weight.flatten()
    y, rstd = reference.rms_norm_forward_torch(x.flatten(-dims), flat, eps)
    return y.view(x.shape), rstd.view(*x.shape[:-dims], *(1,) * dims)


def _backward(
    dy: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    rows, flat = (each.flatten(-len(shape)) for each in (x, dy)), None if weight is None else weight.flatten()
    dx, dw = reference.rms_norm_backward_torch(*rows, flat, rstd.flatten())
    return dx.view(x.shape) if mask[0] else None, dw.view(shape) if mask[1] and weight is not None else None


def trace(function: Callable, *tensors: Tensor, symbolic: bool = False) -> tuple[GraphModule, FakeTensorMode]:
    """A graph of the function, of fake tensors, and their mode. Gradients are wanted of those tensors that say so."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if symbolic else None)
    fakes = [mode.from_tensor(each, static_shapes=not symbolic) for each in tensors]
    return make_fx(function)(*fakes), mode


def compile_regions(gm: GraphModule, mode: FakeTensorMode) -> GraphModule:
    """The graph with its marked regions compiled. It takes all its arguments as one list."""
    from torch.fx.passes.regional_inductor import regional_inductor

    with tracing(TracingContext(mode)):
        return regional_inductor(gm)


def norms(gm: GraphModule) -> list[Node]:
    """aten's fused ones."""
    return [node for node in gm.graph.nodes if node.target in (FORWARD, BACKWARD)]


MARKS = [
    pytest.mark.skipif(not KEEPS_FORWARDS, reason="this torch decomposes forwards when it traces"),
    pytest.mark.usefixtures("fused_norms"),
]
REPLACED = "tilegym_rmsnorm_replaced"
X = torch.randn(4, 8, device=DEVICE)
WEIGHT = torch.rand(8, device=DEVICE) + 0.5
MARK = "compile_with_inductor"


def two_norms(x, weight):
    """Forwards and backwards: the second norm has no weight that learns."""
    y = F.rms_norm(F.rms_norm(x, (8,), weight, 1e-5).sin(), (8,), None, 1e-3)
    return torch.autograd.grad(y.square().sum(), (x, weight))


def two_norms_graph(**options):
    return trace(two_norms, X.clone().requires_grad_(), WEIGHT.clone().requires_grad_(), **options)


def marked(gm):
    return [node for node in gm.graph.nodes if MARK in node.meta.get("custom", {})]


def described(gm):
    """The graph, and the metadata of each node, to be compared."""
    return str(gm.graph), [(node.name, dict(node.meta)) for node in gm.graph.nodes]
