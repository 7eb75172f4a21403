# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Models with our norm under torch.compile, torch.export and AOTInductor: whole graphs, and the bits of eager calls."""

import contextlib
import functools
import operator
import subprocess
import sys

import pytest
import torch
from helpers import BF16, DEVICE, FP32, why_skip
from torch.export import Dim, export
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilegym_rmsnorm import (
    BackendUnavailableError,
    RMSNorm,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    set_backend,
    use_backend,
)

N = 16
BACKEND = "torch" if why_skip("cutile") else "cutile"
COMPILERS = ["eager", "aot_eager", "inductor"]

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]


@pytest.fixture
def kernels(monkeypatch):
    """Let "auto" take the backend by address; return its calls."""
    import by_address

    if DEVICE.type != "cpu":
        pytest.skip("for a CPU")
    by_address.use(monkeypatch)
    return by_address.calls


def rows(*shape, dtype=FP32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=True)


def results_of(call, inputs, parameters):
    """Its results, and the gradients of inputs and parameters."""
    outputs = call(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [*inputs, *parameters]
    loss = sum(each.float().sin().sum() for each in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def assert_same_bits(compiled, eager, inputs, parameters=()):
    both = (results_of(each, inputs, parameters) for each in (compiled, eager))
    for ours, theirs in zip(*both, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


MODULES = {
    "plain": ({}, False),
    "bias, offset, llama": ({"bias": True, "offset": 1.0, "casting": "llama"}, False),
    "out_dtype": ({"out_dtype": BF16}, False),
    "heads": ({"heads": 4}, False),
    "residual": ({}, True),
    "residual, all": (
        {"bias": True, "residual_alpha": 0.5, "residual_dtype": FP32, "heads": 4, "casting": "llama"},
        True,
    ),
    "no weight": ({"elementwise_affine": False}, True),
}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kind", MODULES)
def test_a_module_is_one_graph_of_the_same_bits(kind, compiler):
    options, has_residual = MODULES[kind]
    module = RMSNorm(N, backend=BACKEND, device=DEVICE, **options)
    inputs = [rows(2, 3, 4, N) for _ in range(1 + has_residual)]
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    assert_same_bits(compiled, module, inputs, list(module.parameters()))


BIAS_ALONE = {  # size of x, shape of weight and bias, and what rms_norm is given beside them
    "rows": ((37, 100), (100,), {}),
    "many rows": ((1000, 33), (33,), {"out_dtype": FP32}),
    "heads": ((5, 7, 3, N), (3, N), {}),
    "residual": ((37, 100), (100,), {"residual": 0.5}),
    "residual, heads": ((5, 7, 3, N), (3, N), {"residual": 0.5, "residual_alpha": 2.0}),
    "no rows": ((0, 100), (100,), {}),
}


DY = {  # how the gradient of y lies in memory
    "dense": lambda dy: dy,
    "transposed": lambda dy: dy.mT.contiguous().mT,
    "a scalar": lambda dy: dy.flatten()[:1].sum().expand(dy.shape),
    "a number for each row": lambda dy: dy[..., :1].expand(dy.shape),
    "one row": lambda dy: dy[:1].expand(dy.shape),
    "a slice": lambda dy: torch.cat([dy, dy], -1)[..., ::2],
}


def learn_bias_alone(kind, dtype, has_weight=True, wrap=lambda call: call, lay=DY["dense"]):
    """The gradient of a bias beside x and a weight that are fixed, of one call that `wrap` may compile."""
    size, shape, options = BIAS_ALONE[kind]
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, dy = (torch.randn(size, generator=generator, device=DEVICE).to(dtype) for _ in range(2))
    if "residual" in options:
        options = {**options, "residual": x * options["residual"]}
    weight = torch.ones(shape, device=DEVICE) if has_weight else None
    bias = torch.zeros(shape, device=DEVICE, requires_grad=True)

    def call(x, bias):
        y = rms_norm(x, size[-1:], weight, 1e-6, bias=bias, **options)
        return y[0] if "residual" in options else y

    y = wrap(call)(x, bias)
    return torch.autograd.grad(y, bias, lay(dy.to(y.dtype)))[0]


@pytest.mark.parametrize(
    ("kind", "compiler", "dtype"),
    [
        *((kind, "aot_eager", dtype) for kind in BIAS_ALONE for dtype in (FP32, BF16)),
        *((kind, "inductor", (FP32, BF16)[number % 2]) for number, kind in enumerate(BIAS_ALONE)),
    ],
)
def test_a_bias_that_learns_alone_has_the_bits_of_eager_calls(kind, compiler, dtype):
    """Inductor would add its rows in another order."""
    for has_weight in (True, False)[: 1 + ("heads" not in kind)]:
        torch._dynamo.reset()
        expected = learn_bias_alone(kind, dtype, has_weight)
        with torch._inductor.config.patch(
            force_disable_caches=True
        ):  # which may have graphs of other sources
            wrap = functools.partial(torch.compile, fullgraph=True, backend=compiler)
            assert torch.equal(learn_bias_alone(kind, dtype, has_weight, wrap), expected)


@pytest.mark.parametrize(
    ("kind", "lay"),
    [
        *(("rows", lay) for lay in DY if lay != "dense"),
        *((kind, "transposed") for kind in BIAS_ALONE if kind not in ("rows", "no rows")),
    ],
)
def test_so_it_has_however_dy_lies(kind, lay):
    """AOTAutograd makes dy contiguous; an eager backward is given it as it is."""
    for dtype in (FP32, BF16):
        torch._dynamo.reset()
        expected = learn_bias_alone(kind, dtype, lay=DY[lay])
        wrap = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
        assert torch.equal(learn_bias_alone(kind, dtype, wrap=wrap, lay=DY[lay]), expected)


@pytest.mark.parametrize("kind", ["many rows", "residual, heads"])
def test_so_it_has_in_compiled_autograd(kind):
    expected = learn_bias_alone(kind, FP32)
    with torch._inductor.config.patch(force_disable_caches=True):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="inductor")):
            assert torch.equal(learn_bias_alone(kind, FP32), expected)


@pytest.mark.parametrize("kind", ["rows", "residual"])
def test_no_kernel_runs_for_a_bias_that_learns_alone(kind, kernels):
    """Nor is x kept by the graph for it."""
    saved = []
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        learn_bias_alone(kind, FP32, wrap=compiled)
    assert len(kernels) == 1 and all(each.shape != (37, 100) for each in saved)  # a forward


@pytest.mark.parametrize("dims", [1, 2])
def test_the_function_with_several_dimensions(dims):
    shape = (4, N)[-dims:]
    weight, x = rows(*shape), rows(3, 4, N)
    norm = functools.partial(rms_norm, normalized_shape=shape, eps=1e-4, offset=0.5, backend=BACKEND)
    call = lambda x, weight: norm(x, weight=weight)  # noqa: E731
    assert_same_bits(torch.compile(call, fullgraph=True, backend="aot_eager"), call, [x, weight])


def test_forward_and_backward_without_autograd(backend):
    def both(x, weight, residual):
        y, residual_out, rstd = rms_norm_forward(x, weight, residual=residual, backend=backend)
        options = {"d_residual_out": residual, "needs_db": True, "backend": backend}
        of_sum = rms_norm_backward(residual_out, y, weight, rstd, **options)
        y, rstd = rms_norm_forward(x, weight, backend=backend)
        return (y, rstd, *of_sum, *rms_norm_backward(x, y, weight, rstd, dw_dtype=BF16, backend=backend))

    given = [each.detach() for each in (rows(3, N), rows(N), rows(3, N))]
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(*given), both(*given), strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("compiler", ["eager", "make_fx"])
def test_what_is_without_autograd_is_so_in_a_graph(compiler):
    x, weight = rows(3, N), rows(N)

    def both(x, weight):
        y, rstd = rms_norm_forward(x, weight, backend=BACKEND)
        return (y, rstd, *rms_norm_backward(x, y, weight, rstd, backend=BACKEND))

    from torch.fx.experimental.proxy_tensor import make_fx

    made = make_fx(both)(x, weight) if compiler == "make_fx" else torch.compile(both, backend=compiler)
    # make_fx of 2.14 makes an alias of each detach, which autograd follows.
    keeps_detach = compiler != "make_fx" or not make_fx(lambda x: x.detach())(x)(x).requires_grad
    assert any(each.requires_grad for each in made(x, weight)) == (not keeps_detach)


def test_a_subclass_without_operations_of_its_own():
    """No op of any library takes it in a graph."""

    class Plain(torch.Tensor):
        pass

    x = torch.randn(3, N, device=DEVICE)
    compiled = torch.compile(lambda x: rms_norm(x, N, eps=1e-6), backend="eager")
    torch.testing.assert_close(
        compiled(x.as_subclass(Plain)).as_subclass(torch.Tensor), rms_norm(x, N, eps=1e-6)
    )


def test_a_backend_by_name_is_refused_in_a_graph_as_without_one():
    x = torch.randn(3, N, device=DEVICE, dtype=torch.complex64)
    compiled = torch.compile(lambda x: rms_norm(x, N, backend=BACKEND), backend="eager")
    if BACKEND == "torch":
        pytest.skip("for a kernel")
    with pytest.raises(BackendUnavailableError, match="complex"):
        compiled(x)


def test_a_loop_over_layers_is_one_graph():
    """A break in the loop kept all of it from being compiled: no graph at all, of six layers."""
    layers = torch.nn.ModuleList([RMSNorm(N, backend=BACKEND, device=DEVICE) for _ in range(6)])

    def model(x):
        for layer in layers:
            x = x + layer(x)
        return x

    counter = torch._dynamo.testing.CompileCounter()
    x = rows(3, N)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert torch.equal(compiled(x), model(x)) and counter.frame_count == 1


def nodes_of(call, *inputs):
    """List the targets in Dynamo's graph of a call."""
    graphs = []
    torch.compile(call, fullgraph=True, backend=lambda gm, _: graphs.append(gm) or gm)(*inputs)
    [graph] = graphs
    return [node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output")]


def test_a_norm_leaves_its_op_in_a_graph_and_nothing_else():
    """Each left a question whether torch.func runs it, whose answer nobody used."""
    op = torch.ops.tilegym_rmsnorm.rms_norm_forward.default
    assert nodes_of(RMSNorm(N, device=DEVICE), rows(3, N)) == [op, operator.getitem]


TRANSFORMS = {
    "vmap": lambda norm, x: torch.func.vmap(norm)(x),
    "grad": lambda norm, x: torch.func.grad(lambda x: norm(x).sin().sum())(x),
    "jvp": lambda norm, x: torch.func.jvp(norm, (x,), (x.cos(),)),
    "vmap of grad": lambda norm, x: torch.func.vmap(torch.func.grad(lambda x: norm(x).sin().sum()))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_in_a_graph_is_seen(name):
    """The graph has PyTorch's operations, which it can transform."""
    weight, x = rows(N).detach(), rows(3, N).detach()
    call = functools.partial(TRANSFORMS[name], lambda x: rms_norm(x, N, weight, 1e-6))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), call(x))
    torch._dynamo.reset()
    assert not any("tilegym_rmsnorm" in str(target) for target in nodes_of(call, x))


# An eps that the graph computes: no op takes a number that is not known when it is traced.

OF_SYMBOLS = {
    "plain": lambda x, weight, eps: rms_norm(x, N, weight, eps),
    "all": lambda x, weight, eps: rms_norm(
        x, N, weight, eps, bias=weight, offset=1.0, casting="llama", residual=x.cos(), residual_alpha=0.5
    ),
    "without autograd": lambda x, weight, eps: rms_norm_forward(x.detach(), weight.detach(), eps),
}


@pytest.fixture
def scalar_outputs():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kind", OF_SYMBOLS)
@pytest.mark.usefixtures("scalar_outputs")
def test_an_eps_that_the_graph_computes(kind, compiler):
    def call(x, weight):
        return OF_SYMBOLS[kind](x, weight, x.detach().square().mean().item())

    counter = torch._dynamo.testing.CompileCounterWithBackend(compiler)
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for scale in (1.0, 2.0, 3.0):
        leaves = [(rows(3, N).detach() * scale).requires_grad_(), rows(N)]
        ours, theirs = compiled(*leaves), call(*leaves)
        torch.testing.assert_close(ours, theirs)
        if kind != "without autograd":
            both = (
                torch.autograd.grad(
                    sum(map(torch.sum, each)) if isinstance(each, tuple) else each.sin().sum(), leaves
                )
                for each in (ours, theirs)
            )
            torch.testing.assert_close(*both)
    assert counter.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_an_eps_that_an_exported_graph_computes(strict):
    class Norm(torch.nn.Module):
        def forward(self, x, weight, eps):
            return rms_norm(x, N, weight, eps.abs().item())

    given = rows(3, N).detach(), rows(N).detach()
    exported = export(Norm(), (*given, torch.tensor(1e-3)), strict=strict).module()
    for eps in (1e-3, 1.0):
        torch.testing.assert_close(exported(*given, torch.tensor(eps)), rms_norm(given[0], N, given[1], eps))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_an_eps_that_make_fx_records(mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    given = rows(3, N).detach(), rows(N).detach()
    call = lambda x, weight, eps: rms_norm(x, N, weight, eps.item())  # noqa: E731
    gm = make_fx(call, tracing_mode=mode)(*given, torch.tensor(1e-3))
    for eps in (1e-3, 1.0):
        torch.testing.assert_close(gm(*given, torch.tensor(eps)), rms_norm(given[0], N, given[1], eps))


@pytest.mark.usefixtures("scalar_outputs")
def test_a_kernel_by_name_runs_outside_of_a_graph_that_computes_eps(monkeypatch):
    import by_address

    if DEVICE.type != "cpu":
        pytest.skip("for a CPU")
    by_address.use(monkeypatch)
    call = lambda x: rms_norm(x, N, None, x.detach().square().mean().item(), backend="cutile")  # noqa: E731
    x = rows(3, N)
    torch.testing.assert_close(torch.compile(call, backend="eager")(x), call(x))
    assert by_address.calls == ["rms_norm_forward"] * 2
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="an eps that the graph computes"):
        torch.compile(call, fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("dynamic", [None, True])
def test_twenty_batch_sizes_have_at_most_three_graphs(dynamic):
    module = RMSNorm(N, backend=BACKEND, device=DEVICE)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=dynamic)
    for count in range(1, 21):
        assert_same_bits(compiled, module, [rows(count, N)], [module.weight])
    assert counter.frame_count <= 3


def test_what_runs_is_decided_when_the_graph_runs(kernels):
    compiled = torch.compile(RMSNorm(N), fullgraph=True, backend="aot_eager")
    x = rows(3, N)
    with use_backend("torch"):
        compiled(x)
    assert not kernels
    compiled(x).sum().backward()
    assert kernels == ["rms_norm_forward", "rms_norm_backward"]
    kernels.clear()
    set_backend("torch")
    try:
        compiled(x).sum().backward()
    finally:
        set_backend(None)
    assert not kernels


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_op_for_all_batches(strict):
    module = RMSNorm(N, backend=BACKEND, device=DEVICE)
    program = export(
        module, (rows(4, N).detach(),), strict=strict, dynamic_shapes=({0: Dim("batch", min=2, max=64)},)
    )
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "tilegym_rmsnorm.rms_norm_forward.default" in names
    exported = program.module()
    assert_same_bits(exported, module, [rows(7, N)])


def test_export_with_a_residual():
    module = RMSNorm(N, backend=BACKEND, device=DEVICE, residual_alpha=0.5)
    given = rows(4, N).detach(), rows(4, N).detach()
    exported = export(module, given).module()
    assert torch.equal(torch.compile(exported, fullgraph=True, backend="eager")(*given)[0], module(*given)[0])
    for ours, theirs in zip(exported(*given), module(*given), strict=True):
        assert torch.equal(ours, theirs)


AOTI_OF_PYTORCH = """
import sys, torch
path = torch._inductor.aoti_compile_and_package(
    torch.export.export(torch.nn.ReLU(), (torch.ones(4, device=sys.argv[1]),)), package_path=sys.argv[2])
torch._inductor.aoti_load_package(path)
"""


def test_aotinductor_from_python(tmp_path):
    if DEVICE.type != "cpu":  # some builds of torch 2.11 for CUDA end where they load a package, of any model
        program = [sys.executable, "-c", AOTI_OF_PYTORCH, DEVICE.type, str(tmp_path / "relu.pt2")]
        if subprocess.run(program, capture_output=True).returncode != 0:
            pytest.skip("this torch cannot load a package of ReLU either")
    module = RMSNorm(N, backend=BACKEND, device=DEVICE).requires_grad_(False)
    x = rows(4, N).detach()
    path = torch._inductor.aoti_compile_and_package(
        export(module, (x,)), package_path=str(tmp_path / "norm.pt2")
    )
    assert torch.equal(torch._inductor.aoti_load_package(path)(x), module(x))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_autograd(is_compiled):
    module = RMSNorm(N, backend=BACKEND, device=DEVICE)
    x, residual = rows(4, N), rows(4, N)
    expected = results_of(module, [x, residual], [module.weight])[2:]
    forward = torch.compile(module, fullgraph=True, backend="aot_eager") if is_compiled else module
    compiler = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    leaves = [x, residual, module.weight]
    with torch._dynamo.compiled_autograd._enable(compiler()):
        sum(each.sin().sum() for each in forward(x, residual)).backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_selective_checkpointing_in_a_graph_by_policy():
    """The op is one that a policy can name: saved, its forward runs once."""
    op = torch.ops.tilegym_rmsnorm.rms_norm_forward.default
    linear = torch.nn.Linear(N, N, device=DEVICE)

    def block(x):
        return linear(rms_norm(linear(x).sin(), N, backend=BACKEND).cos())

    counts = {}
    for policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE):

        def choose(context, function, *args, policy=policy, **kwargs):
            return policy if function is op else CheckpointPolicy.PREFER_RECOMPUTE

        def model(x, choose=choose):
            contexts = functools.partial(create_selective_checkpoint_contexts, choose)
            return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

        graphs = []

        def keep(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph

        from torch._dynamo.backends.common import aot_autograd

        torch._dynamo.reset()
        x = rows(3, N)
        compiled = torch.compile(
            model, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)
        )
        expected = results_of(block, [x], [])
        torch.testing.assert_close(results_of(compiled, [x], []), expected)
        counts[policy] = sum(node.target is op for graph in graphs for node in graph.graph.nodes)
    assert counts == {CheckpointPolicy.MUST_SAVE: 1, CheckpointPolicy.MUST_RECOMPUTE: 2}


def test_autocast_in_a_graph():
    """Eager calls agree: a CPU's autocast changes nothing."""
    module = RMSNorm(N, backend=BACKEND, device=DEVICE)
    x = rows(3, N, dtype=BF16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast(DEVICE.type, dtype=BF16):
        assert_same_bits(compiled, module, [x], [module.weight])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("n", [2048, 32768], ids=["", "blocks that wait"])
def test_reduce_overhead_and_graphed_callables(n):
    module = RMSNorm(n, backend=BACKEND, device=DEVICE, dtype=BF16)
    x = rows(64, n, dtype=BF16)
    with contextlib.suppress(AttributeError):
        torch.compiler.cudagraph_mark_step_begin()
    compiled = torch.compile(module, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        expected = results_of(module, [x], [module.weight])
        found = [each.clone() for each in results_of(compiled, [x], [module.weight])]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    other = RMSNorm(n, backend=BACKEND, device=DEVICE, dtype=BF16)
    other.load_state_dict(module.state_dict())
    graphed = torch.cuda.make_graphed_callables(other, (torch.randn_like(x, requires_grad=True),))
    expected = results_of(module, [x], [module.weight])
    found = results_of(graphed, [x], [other.weight])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
