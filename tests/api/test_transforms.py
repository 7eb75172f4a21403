# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Ops under torch.func: PyTorch's operations, which run there, do what the formula does; torch.jit."""

import pytest
import torch
import torch.nn.functional as F
from every_op import of_each_op
from helpers import in_turn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tilegym_rmsnorm import RMSNorm, qk_norm_rope, rms_norm
from tilegym_rmsnorm.integrations import apex, liger, tilegym, transformer_engine

N = 8
X, W = torch.randn(4, 3, N, dtype=torch.float64), torch.rand(5, N, dtype=torch.float64) + 0.5
EPS = 1e-3


def ours(rows, weight=W[0]):
    return rms_norm(rows, (N,), weight, EPS)


def theirs(rows, weight=W[0]):
    return F.rms_norm(rows, (N,), weight, EPS)


def leaf(tensor):
    return tensor.clone().requires_grad_()


ROWS = "input", "residual", "q", "k", "x"  # of leaves; the others are weights and biases


def stacked(tensors):
    return [torch.stack([each, each.cos()]) for each in tensors]


def loss(function):
    return lambda *tensors: sum(each.sin().sum() for each in function(*tensors))


def mapped(function, leaves, are_mapped):
    """Map a function over batches of some of its leaves, by their names."""
    given = [torch.stack([each, each.cos()]) if are_mapped(name) else each for name, each in leaves.items()]
    return vmap(function, tuple(0 if are_mapped(name) else None for name in leaves))(*given)


def recorded_outside(function, tensors):
    """Run backward through a transform, to tensors recorded outside of it: such gradients were lost."""
    tensors = [each.detach().clone().requires_grad_() for each in tensors]
    return torch.autograd.grad(loss(function)(*tensors), tensors)


def of_each_tangent(function, tensors):
    """Forward mode of one tensor after the other."""
    found = []
    for i, each in enumerate(tensors):
        with forward_ad.dual_level():
            results = function(*tensors[:i], forward_ad.make_dual(each, each.cos()), *tensors[i + 1 :])
            pairs = [(y, forward_ad.unpack_dual(y).tangent) for y in results]
            found += [torch.zeros(y.shape).to(y) if tangent is None else tangent for y, tangent in pairs]
    return found


def linearized(function, tensors):
    results, product = linearize(function, *tensors)
    return results, product(*map(torch.cos, tensors))


TRANSFORMS = {  # of a function, and of leaves by their names
    "vmap": lambda f, **x: vmap(f)(*stacked(x.values())),
    "vmap over rows": lambda f, **x: mapped(f, x, lambda name: name in ROWS),
    "vmap over the first": lambda f, **x: mapped(f, x, lambda name: name == next(iter(x))),
    "vmap over vectors": lambda f, **x: mapped(f, x, lambda name: name not in ROWS),
    "vmap over the second dimension": lambda f, **x: vmap(f, 1, 1)(
        *(torch.stack([each, -each], 1) for each in x.values())
    ),
    "vmap of vmap": lambda f, **x: vmap(vmap(f))(*stacked(stacked(x.values()))),
    "grad": lambda f, **x: grad(loss(f), tuple(range(len(x))))(*x.values()),
    "grad of vmap": lambda f, **x: grad(loss(vmap(f)))(*stacked(x.values())),
    "backward of vmap": lambda f, **x: recorded_outside(vmap(f), stacked(x.values())),
    "backward of vmap of vmap": lambda f, **x: recorded_outside(vmap(vmap(f)), stacked(stacked(x.values()))),
    "backward of vmap to captured tensors": lambda f, **x: recorded_outside(
        lambda *given: vmap(lambda scale: f(scale * given[0], *given[1:]))(torch.ones(2).to(given[0])),
        x.values(),
    ),
    "gradients of each sample": lambda f, **x: vmap(grad(loss(f), tuple(range(len(x)))))(
        *stacked(x.values())
    ),
    "vjp": lambda f, **x: vjp(f, *x.values())[1](f(*map(torch.cos, x.values()))),
    "jvp": lambda f, **x: jvp(f, tuple(x.values()), tuple(map(torch.cos, x.values()))),
    "tangents": lambda f, **x: of_each_tangent(f, tuple(x.values())),
    "linearize": lambda f, **x: linearized(f, tuple(x.values())),
    "jacrev": lambda f, **x: jacrev(f)(*x.values()),
    "jacfwd": lambda f, **x: jacfwd(f)(*x.values()),
    "hessian": lambda f, **x: hessian(loss(f))(*x.values()),
}
SMOOTH = "plain", "alpha", "weights of heads", "one tensor"
of_smooth_kinds = of_each_op(lambda op: {name: op.smooth[name] for name in SMOOTH if name in op.smooth})


@of_smooth_kinds
@pytest.mark.parametrize("is_op", [False, True], ids=["function", "op"])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_transforms_do_as_of_the_formula(name, is_op, op, kind):
    """Where a call like it is known, too."""
    call = op.make(kind)
    function = call.by_op if is_op else call.public
    for _ in range(2):
        function(*call.leaves.values())
    found, expected = (TRANSFORMS[name](each, **call.leaves) for each in (function, call.exact))
    torch.testing.assert_close(found, expected)


def test_a_module_and_half_precision():
    norm = RMSNorm((2, N), eps=EPS, dtype=torch.bfloat16)
    x = torch.randn(3, 5, 2, N, dtype=torch.bfloat16)
    parameters = dict(norm.named_parameters())
    y = vmap(lambda rows: functional_call(norm, parameters, (rows,)))(x)
    assert torch.equal(y, norm(x)) and y.requires_grad
    (dw,) = grad(lambda given: functional_call(norm, given, (x,)).float().sin().sum())(parameters).values()
    expected = torch.autograd.grad(norm(x).float().sin().sum(), norm.weight)[0]
    torch.testing.assert_close(dw, expected, rtol=2e-2, atol=2e-1)


COMPILED = "vmap", "grad", "grad of vmap", "gradients of each sample", "vjp", "jacrev"


@pytest.mark.parametrize(("name", "backend"), in_turn(COMPILED, [None, "torch"], of=2))
@of_each_op(lambda op: {name: each for name, each in op.smooth.items() if name == "plain"})
def test_transforms_inside_torch_compile_do_as_of_the_formula(name, backend, op, kind):
    """Their gradients were 0."""
    torch._dynamo.reset()
    call = op.make(kind)
    run = torch.compile(
        lambda: TRANSFORMS[name](lambda *given: call.public(*given, backend=backend), **call.leaves),
        backend="eager",
    )
    torch.testing.assert_close(run(), TRANSFORMS[name](call.exact, **call.leaves))


@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_tensor_that_is_not_transformed_among_some_that_are(needs_grad):
    """A frozen norm in front of a head whose parameters alone are transformed."""
    x = X.clone().requires_grad_(needs_grad)
    for rows in (x, x[0]):
        got, expected = (
            grad(lambda head, rows=rows, norm=norm: (norm(rows) * head).sin().sum())(W[1])
            for norm in (ours, theirs)
        )
        torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("size", [(4, N), (2, 3, N)])
def test_torch_jit_trace(size, needs_grad):
    """Rows were a constant of the trace, or it failed; nn.RMSNorm can be traced."""
    norm = RMSNorm(N, eps=EPS).requires_grad_(needs_grad)
    traced = torch.jit.trace(torch.nn.Sequential(norm, torch.nn.SiLU()), torch.randn(size))
    x = torch.randn(7, *size[1:])
    torch.testing.assert_close(traced(x), F.silu(norm(x)))
    assert traced(x).requires_grad == needs_grad


RECORDED = {
    "torch.jit.trace": lambda module, x: torch.jit.trace(module, (x,)),
    "torch.export": lambda module, x: torch.export.export(module, (x,)).module(),
    "make_fx": lambda module, x: make_fx(module)(x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("record", RECORDED)
def test_what_is_recorded_without_grad_has_gradients(record):
    """x got none, in silence: a rounding of bfloat16 was recorded as a constant. And torch.jit.trace refused such norms
    with grad, since its own check records them once more without."""
    norm = RMSNorm(N, casting="llama", dtype=torch.bfloat16, backend="torch")
    x = torch.randn(4, N).bfloat16().requires_grad_()
    [expected] = torch.autograd.grad(norm(x).float().pow(3).sum(), x)
    for needs_grad in (False, True):
        with torch.set_grad_enabled(needs_grad):
            recorded = RECORDED[record](norm, x.detach())
        [gradient] = torch.autograd.grad(recorded(x).float().pow(3).sum(), x)
        assert torch.equal(gradient, expected)


def calling(x: torch.Tensor) -> torch.Tensor:
    return 2 * rms_norm(x, [N])


class Calling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return calling(x)


class Halved(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def of_another_class():
    norm = torch.nn.RMSNorm(N)
    norm.__class__ = RMSNorm
    return norm


SCRIPTED = {
    "a norm": lambda: RMSNorm(N),
    "options": lambda: RMSNorm(N, offset=1.0, bias=True, casting="llama", backend="torch"),
    "a kernel by name": lambda: RMSNorm(N, backend="cutile"),
    "a configured class": lambda: RMSNorm.configured(offset=1.0)(N),
    "in a model": lambda: torch.nn.ModuleDict({"block": torch.nn.Sequential(RMSNorm(N), torch.nn.SiLU())}),
    "a configured class in a model": lambda: torch.nn.Sequential(RMSNorm.configured(bias=True)(N)),
    "a forward of one's own": lambda: Halved(N),
    "a module that got the class": of_another_class,
    "the function": lambda: rms_norm,
    "the rotation": lambda: qk_norm_rope,
    "a function that calls it": lambda: calling,
    "a module that calls it": lambda: Calling(),
    "Apex's": lambda: apex.FusedRMSNorm(N),
    "Liger's": lambda: liger.LigerRMSNorm(N),
    "TileGym's": lambda: tilegym.TileRMSNorm(N),
    "TransformerEngine's": lambda: transformer_engine.RMSNorm(N),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", SCRIPTED)
def test_torch_jit_script_is_refused(name):
    made = SCRIPTED[name]()
    with pytest.raises(RuntimeError, match=r"^torch\.jit\.script .*torch\.export\.export[^\n]*$"):
        torch.jit.script(made)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_that_torch_jit_script_refused_is_as_before():
    model, x = torch.nn.Sequential(RMSNorm(N), torch.nn.SiLU()), torch.randn(3, N)
    expected, parts = model(x), list(model.named_modules())
    with pytest.raises(RuntimeError, match="torch.export"):
        torch.jit.script(model)
    assert list(model.named_modules()) == parts and torch.equal(model(x), expected)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_by_transforms_do_not_see_the_rounding_of_xhat(dtype):
    """They were rounded with it, and in float16 overflowed to NaN."""
    x = (1000 * torch.randn(16, N)).to(dtype)
    weight, dy = torch.full((N,), 3.0), torch.full((16, N), 5e4 if dtype is torch.float16 else 1.0).to(dtype)

    def norm(x, weight):
        return rms_norm(x, (N,), weight, EPS, casting="llama", backend="torch")

    leaves = leaf(x), leaf(weight)
    y = norm(*leaves)
    expected = torch.autograd.grad(y, leaves, dy)
    transformed, pullback = vjp(norm, x, weight)
    dx, dw = pullback(dy)
    assert torch.equal(transformed, y) and dx.isfinite().all()
    # The reference's own backward, and PyTorch's of its formula, round once, in another order of operations.
    torch.testing.assert_close(dx, expected[0], rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    torch.testing.assert_close(dw, expected[1], rtol=1e-5, atol=1e-5 * float(expected[1].abs().max()))
