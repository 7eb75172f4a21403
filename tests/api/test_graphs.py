# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Graphs by torch.export, torch.compile(fullgraph=True) and make_fx: of each op, and of a model with an RMSNorm; and
exported ones without library ops, for runtimes that know PyTorch's operations alone."""

import by_address
import pytest
import torch
import torch.nn.functional as F
from every_op import assert_same_bits, each_op, ends, note_backends, of_each_op, of_options
from helpers import BF16, FP16, FP32, FP64
from torch import nn
from torch.export import Dim, default_decompositions, export
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Linear, Sequential
from torch.torch_version import TorchVersion

from tilegym_rmsnorm import (
    RMSNorm,
    get_current_backend,
    qk_norm_rope,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    use_backend,
)
from tilegym_rmsnorm.integrations.export import decompositions

X = torch.randn(4, 8)


def make_model(norm):
    torch.manual_seed(0)
    return Sequential(Linear(8, 8), norm, Linear(8, 1))


def gradients(module):
    module(X).sin().sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("dynamic", [False, True])
@of_each_op(ends)
def test_compiled_in_one_graph_with_the_bits_of_eager_calls(op, kind, dynamic):
    torch._dynamo.reset()
    first = op.make(kind)
    graph = torch.compile(first.public, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for call in (first, op.make(op.longer(kind), seed=1)):
        assert_same_bits(call.both_passes(graph), call.both_passes())


@of_each_op(of_options)
def test_each_option_in_a_graph(op, kind):
    torch._dynamo.reset()
    call = op.make(kind)
    options = [{name: value} for name, values in op.options[1].items() for value in values]

    def calls(*tensors):
        return [result for changes in options for result in call.public(*tensors, **changes)]

    graph = torch.compile(calls, backend="aot_eager", fullgraph=True)
    found = []
    for function in (graph, calls):
        leaves = call.recorded()
        results = function(*leaves, *call.fixed.values())
        total = sum(each.sin().sum().double() / (i + 1) for i, each in enumerate(results))
        found.append((results, torch.autograd.grad(total, leaves)))
    (of_graph, gradients), (expected, expected_gradients) = found
    assert_same_bits(of_graph, expected)
    for one, other in zip(gradients, expected_gradients, strict=True):  # added up in another order
        assert (one - other).double().norm() <= 2e-2 * other.double().norm()


@each_op
def test_a_backend_for_a_part_of_a_graph(op, monkeypatch):
    """Written into the graph of both passes: it holds when the graph runs, wherever that is."""
    torch._dynamo.reset()
    call = op.make(op.alike)

    def in_a_block(*tensors):
        with use_backend("cutile"):
            return call.public(*tensors)

    graph = torch.compile(in_a_block, backend="aot_eager", fullgraph=True)
    ran = note_backends(monkeypatch)
    with use_backend("torch"):
        assert_same_bits(call.both_passes(graph), call.both_passes(backend="cutile"))
    assert set(ran) == {"cutile"}


class Calling(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.function = call.public

    def forward(self, *tensors):
        return self.function(*tensors)


@pytest.mark.parametrize("strict", [False, True])
@of_each_op()
def test_exported(op, kind, strict):
    torch._dynamo.reset()
    call = op.make(kind)
    program = torch.export.export(Calling(call), call.tensors, strict=strict)
    assert op.forward in [node.target for node in program.graph.nodes]
    assert_same_bits(program.module()(*call.tensors), call.public(*call.tensors))


@of_each_op()
def test_made_by_make_fx(op, kind):
    """Of both passes."""
    call, other = op.make(kind), op.make(kind, seed=3)

    def passes(*tensors):
        leaves = [each.detach().requires_grad_() for each in tensors[: len(call.leaves)]]
        outputs = call.public(*leaves, *tensors[len(leaves) :])
        return *outputs, *torch.autograd.grad(outputs, leaves, [each.sin() for each in outputs])

    graph = make_fx(passes)(*call.tensors)
    assert {op.forward, op.backward} <= {node.target for node in graph.graph.nodes}
    assert_same_bits(graph(*other.tensors), passes(*other.tensors))


@pytest.mark.parametrize("backend", [None, "auto", "torch"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_has_all_gradients(strict, backend):
    """Gradients of all that comes before the norm were lost: the graph turned them off at it."""
    expected = gradients(make_model(torch.nn.RMSNorm(8)))
    torch._dynamo.reset()
    exported = torch.export.export(make_model(RMSNorm(8, backend=backend)), (X,), strict=strict)
    assert "set_grad_enabled" not in exported.graph_module.code
    got = gradients(exported.module())
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=name)


@pytest.mark.parametrize("residual", [None, X])
def test_a_compiled_step_in_which_a_bias_alone_learns_keeps_no_x(residual):
    torch._dynamo.reset()
    saved, bias = [], torch.zeros(8, requires_grad=True)
    compiled = torch.compile(lambda x: rms_norm(x, 8, bias=bias, residual=residual), backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = compiled(X)
    (db,) = torch.autograd.grad(y if residual is None else y[0], bias, X)
    torch.testing.assert_close(db, X.sum(0))
    assert saved and all(each.numel() < X.numel() for each in saved)


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_with_a_backend_by_name_runs_on_it(strict, monkeypatch):
    """Strict export took the reference, whatever was in effect."""
    by_address.use(monkeypatch)
    torch._dynamo.reset()
    exported = torch.export.export(RMSNorm(8, backend="cutile"), (X,), strict=strict).module()
    assert not by_address.calls
    torch.testing.assert_close(exported(X), F.rms_norm(X, (8,)))
    assert by_address.calls == ["rms_norm_forward"]


@pytest.mark.parametrize("strict", [False, True])
def test_the_ops_below_autograd_are_exported(strict):
    class Ops(torch.nn.Module):
        def forward(self, x):
            y, rstd = rms_norm_forward(x, None)
            return y, rms_norm_backward(x, y, None, rstd)[0]

    torch._dynamo.reset()
    for got, expected in zip(
        torch.export.export(Ops(), (X,), strict=strict).module()(X), Ops()(X), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("dtype", "residual_dtype", "n"), [(torch.complex64, torch.complex128, 8), (BF16, FP32, 0)]
)
def test_what_is_exported_promotes_no_dtypes(dtype, residual_dtype, n, strict):
    """torch.export records a call of torch.promote_types as a node, which compilers of graphs do not know."""

    class Norm(torch.nn.Module):
        def forward(self, x, residual):
            return rms_norm(x, (n,), residual=residual)

    given = torch.randn(3, n, dtype=dtype), torch.randn(3, n, dtype=residual_dtype)
    torch._dynamo.reset()
    exported = torch.export.export(Norm(), given, strict=strict)
    assert "promote_types" not in exported.graph_module.code
    torch.testing.assert_close(exported.module()(*given), Norm()(*given))


def test_a_block_of_use_backend_made_outside_of_the_graph(monkeypatch):
    """Dynamo cannot enter it before 2.14. In one graph that is an error, which says why; else the graph breaks there,
    and the block is in effect as in any eager call."""
    by_address.use(monkeypatch)
    block = use_backend("cutile")

    def norm(x):
        with block:
            y = rms_norm(x * 1, (8,))
        return y * 2

    torch._dynamo.reset()
    ways = [False]
    if TorchVersion(torch.__version__) >= "2.14":
        ways = [True, False]
    else:
        text = "(?s)`use_backend` context manager.*created outside the compiled region"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=text):
            torch.compile(norm, backend="eager", fullgraph=True)(X)
        assert not by_address.calls and get_current_backend() == "auto"
    for fullgraph in ways:
        torch._dynamo.reset()
        by_address.calls.clear()
        compiled = torch.compile(norm, backend="eager", fullgraph=fullgraph)
        for count in (1, 2):
            torch.testing.assert_close(compiled(X), F.rms_norm(X, (8,)) * 2)
            assert by_address.calls == ["rms_norm_forward"] * count
        assert get_current_backend() == "auto"


N = 16


class Norms(nn.Module):
    """Norms with each kind of rounding, and a rotation."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.plain = RMSNorm(N, dtype=dtype)
        self.llama = RMSNorm(N, bias=True, offset=1.0, casting="llama", residual_dtype=dtype)
        self.heads = RMSNorm(N, heads=2, dtype=dtype, casting="llama")
        for parameter in self.parameters():
            nn.init.normal_(parameter, 1.0)

    def forward(self, x, residual):
        y, total = self.llama(self.plain(x), residual)
        q = self.heads(y.unflatten(-2, (-1, 2)))
        table = residual.detach()[:, ::2].float()
        return *qk_norm_rope(q, q, self.plain.weight, None, table, table, rope_rounding="each"), total


def targets(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target).partition(".")[0] for node in graph.nodes if node.op == "call_function"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "of_pytorch", "strict"),
    [(FP32, False, False), (BF16, False, True), (FP16, True, False), (BF16, True, True)],
)
def test_an_exported_program_without_ops(dtype, of_pytorch, strict):
    """run_decompositions without a table keeps the ops."""
    torch._dynamo.reset()
    model = Norms(dtype)
    x, residual = torch.randn(3, 6, N).to(dtype), torch.randn(3, 6, N)
    batch = Dim("batch", min=2, max=64)
    program = export(model, (x, residual), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    assert "tilegym_rmsnorm" in targets(program.run_decompositions().graph)
    table = decompositions()
    if of_pytorch:
        table = default_decompositions()
        table.update(decompositions())
    program = program.run_decompositions(table)
    assert "tilegym_rmsnorm" not in targets(program.graph)
    assert "dtype" not in {getattr(node.target, "_overloadname", "") for node in program.graph.nodes}
    for count in (3, 2, 5):
        given = torch.randn(count, 6, N).to(dtype), torch.randn(count, 6, N)
        assert_same_bits(program.module()(*given), model(*given))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
def test_a_step_without_ops(dtype):
    """The backwards are decomposed too."""
    model = Norms(dtype)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def step(x, residual, *values):
        y = torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x, residual))
        return torch.autograd.grad(sum(each.double().sin().sum() for each in y), (x, residual, *values))

    given = torch.randn(3, 6, N, dtype=dtype).requires_grad_(), torch.randn(3, 6, N).requires_grad_()
    given += tuple(p.detach().requires_grad_() for p in parameters)
    with_ops = make_fx(step, tracing_mode="fake")(*given)
    assert "tilegym_rmsnorm" in targets(with_ops.graph)
    graph = make_fx(step, tracing_mode="symbolic", decomposition_table=decompositions())(*given)
    assert "tilegym_rmsnorm" not in targets(graph.graph)
    assert_same_bits(graph(*given), step(*given))


def test_the_roundings_of_kernels_not_of_a_table():
    """`translated` ends with the call: a graph that is trained afterwards has the gradients of the rounding."""
    x = torch.randn(3, N, dtype=BF16, requires_grad=True)
    program = export(RMSNorm(N, casting="llama", dtype=BF16), (x,))
    program.run_decompositions(decompositions())
    with use_backend("torch"):
        module = export(RMSNorm(N, casting="llama", dtype=BF16), (x,)).module()
    (dx,) = torch.autograd.grad(module(x).float().sin().sum(), x)
    (expected,) = torch.autograd.grad(
        rms_norm(x, N, torch.ones(N, dtype=BF16), casting="llama").float().sin().sum(), x
    )
    torch.testing.assert_close(dx, expected)
