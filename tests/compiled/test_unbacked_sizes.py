# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Sizes that are known only when a graph runs, as those of x[mask], where two tensors of a call must agree: one graph,
which compares them when it runs, as that of PyTorch's add does."""

import pytest
import torch
from helpers import DEVICE, skipped_where_fails
from torch._dynamo.testing import CompileCounterWithBackend

from tilegym_rmsnorm import qk_norm_rope, rms_norm, rms_norm_backward, rms_norm_forward, rms_norm_rope

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]

N, EPS = 8, 1e-6
TABLE = torch.randn(6, N, device=DEVICE)
OPS = torch.ops.tilegym_rmsnorm


@pytest.fixture(autouse=True)
def shapes_of_results():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def rows(x, mask, *dims):
    """The rows that a mask takes, with a dimension of one element before the last for each of `dims`."""
    x = x[mask]
    for _ in dims:
        x = x.unsqueeze(1)
    return x


def backward(x, w, first, second):
    y, rstd = rms_norm_forward(rows(x, first), w, EPS)
    return (y, *rms_norm_backward(rows(x, first), rows(x, second), w, rstd))


def op_of_backward(x, w, first, second):
    x, dy = rows(x, first), rows(x, second)
    return OPS.rms_norm_backward(dy, x, w, x[:, :1], None, 3, 1, 0.0, "once", 1.0, *[None] * 5)[:2]


CALLS = {
    "a residual": lambda x, w, a, b: rms_norm(rows(x, a), N, w, EPS, residual=rows(x, b)),
    "a residual, torch": lambda x, w, a, b: rms_norm(
        rows(x, a), N, w, EPS, residual=rows(x, b), backend="torch"
    ),
    "a residual of rms_norm_forward": lambda x, w, a, b: rms_norm_forward(
        rows(x, a), w, EPS, residual=rows(x, b)
    ),
    "dy": backward,
    "dy of the op": op_of_backward,
    "a residual of the op": lambda x, w, a, b: OPS.rms_norm_forward(
        rows(x, a), rows(x, b), w, None, 1, EPS, 0.0, "once", 1.0, torch.float32, None, None
    ),
    "q and k": lambda x, w, a, b: qk_norm_rope(
        rows(x, a, 1), rows(x, b, 1), w, w, TABLE[a], TABLE[b], eps=EPS
    ),
    "q and k, torch": lambda x, w, a, b: qk_norm_rope(
        rows(x, a, 1), rows(x, b, 1), w, w, TABLE[a], TABLE[b], eps=EPS, backend="torch"
    ),
    "batches of q and k": lambda x, w, a, b: qk_norm_rope(
        rows(x, a, 1, 2), rows(x, b, 1, 2), w, w, TABLE[:1], TABLE[:1], eps=EPS
    ),
    "batches of tables": lambda x, w, a, b: rms_norm_rope(
        rows(x, a, 1, 2), w, rows(TABLE, b, 1), rows(TABLE, b, 1), eps=EPS
    ),
    "positions": lambda x, w, a, b: rms_norm_rope(
        rows(x, a, 1), w, TABLE, TABLE, position_ids=torch.arange(6, device=x.device)[b], eps=EPS
    ),
    "cos and sin": lambda x, w, a, b: rms_norm_rope(rows(x, a, 1), w, TABLE[a], TABLE[b], eps=EPS),
    "weights of heads": lambda x, w, a, b: rms_norm(rows(x, a)[None], N, rows(x, b) * w, EPS),
}


def join(x, mask):
    """Inductor of PyTorch 2.9 and 2.11 joins nothing that has four dimensions, one of them unknown."""
    x = rows(x, mask, 1)[None]
    return torch.cat((x + 1, x + 2), -1)


def results_of(call, x, w, *masks):
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    outputs = call(*leaves, *masks)
    outputs = [each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each is not None]
    recorded = [each for each in outputs if each.requires_grad]
    if not recorded:
        return outputs
    return *outputs, *torch.autograd.grad([each.sin().sum() for each in recorded], leaves)


# AOTAutograd is given what Dynamo traces, which "eager" runs as it is: of that one call of each function. An op is one
# call to Inductor, which compiles the operations of backend "torch": those of qk_norm_rope hold those of rms_norm.
COMPILED = [
    *((name, "eager") for name in ("a residual", "dy", "dy of the op", "q and k")),
    *((name, "aot_eager") for name in CALLS),
    *((name, "inductor") for name in ("a residual", "q and k, torch")),
]


@pytest.mark.parametrize(("name", "compiler"), COMPILED)
def test_two_sizes_that_a_graph_computes(name, compiler):
    call, w = CALLS[name], torch.rand(N, device=DEVICE)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    masks = [torch.tensor(each, device=DEVICE) > 0 for each in ([1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0])]
    for count in (4, 3):  # other sizes run by the same graph
        x = torch.randn(6, N, device=DEVICE)
        given = [each & (each.cumsum(0) <= count) for each in masks]
        with skipped_where_fails(
            lambda: torch.compile(join, fullgraph=True, backend=compiler)(TABLE, masks[0])
        ):
            ours = results_of(compiled, x, w, *given)
        torch.testing.assert_close(ours, results_of(call, x, w, *given))
    assert counter.frame_count == 1
    with pytest.raises(
        (RuntimeError, ValueError), match="Runtime assertion failed|Eq\\(|expected|must match"
    ):
        compiled(torch.randn(6, N, device=DEVICE), w, masks[0], masks[1] & masks[0])


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_weight_of_a_width_that_a_graph_computes(compiler):
    x, w = torch.randn(3, N, device=DEVICE), torch.rand(N, device=DEVICE)
    call = lambda x, w, mask: rms_norm(x, N, w[mask], EPS)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    whole = torch.ones(N, device=DEVICE) > 0
    torch.testing.assert_close(compiled(x, w, whole), call(x, w, whole))
    with pytest.raises((RuntimeError, ValueError), match="Runtime assertion failed|expected"):
        compiled(x, w, whole & (torch.arange(N, device=DEVICE) > 0))


@pytest.mark.parametrize("strict", [False, True])
def test_two_sizes_that_an_exported_graph_computes(strict):
    class Norm(torch.nn.Module):
        def forward(self, x, w, a, b):
            return rms_norm(x[a], N, w, EPS, residual=x[b])

    x, w = torch.randn(6, N, device=DEVICE), torch.rand(N, device=DEVICE)
    a, b = (torch.tensor(each, device=DEVICE) > 0 for each in ([1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0]))
    exported = torch.export.export(Norm(), (x, w, a, b), strict=strict).module()
    torch.testing.assert_close(exported(x, w, a, b), Norm()(x, w, a, b))
    with pytest.raises((RuntimeError, ValueError), match="Runtime assertion failed|expected"):
        exported(x, w, a, a & b)
