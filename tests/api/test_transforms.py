# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""rms_norm under torch.func: the reference, which "auto" takes there, does all that F.rms_norm does; torch.jit."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad, gradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tilegym_rmsnorm import RMSNorm, rms_norm
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


def gradient_of(function, tensor):
    """Run backward through a transform, to a tensor recorded outside of it: such gradients were lost."""
    tensor = leaf(tensor)
    return torch.autograd.grad(function(tensor).sin().sum(), tensor)[0]


TRANSFORMS = {
    "vmap": lambda f: vmap(f)(X),
    "vmap of vmap": lambda f: vmap(vmap(f))(X),
    "vmap over the second dimension": lambda f: vmap(f, in_dims=1, out_dims=1)(X),
    "grad": lambda f: grad(lambda x: f(x).sin().sum())(X),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(x).sin().sum())(X),
    "backward of vmap": lambda f: gradient_of(vmap(f), X),
    "backward of vmap of vmap": lambda f: gradient_of(vmap(vmap(f)), X),
    "backward of vmap over weights": lambda f: gradient_of(vmap(lambda weight: f(X, weight)), W),
    "backward of vmap to a captured weight": lambda f: gradient_of(
        lambda weight: vmap(lambda x: f(x, weight))(X), W[0]
    ),
    "gradients of each sample": lambda f: vmap(grad(lambda w, x: f(x, w).sin().sum()), (None, 0))(W[0], X),
    "vjp": lambda f: vjp(f, X, W[0])[1](X.cos()),
    "jvp": lambda f: jvp(f, (X, W[0]), (X.cos(), W[1])),
    "jacrev": lambda f: jacrev(f)(X[0]),
    "jacfwd": lambda f: jacfwd(f)(X[0]),
    "hessian": lambda f: hessian(lambda x: f(x).sin().sum())(X[0, 0]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_do_as_for_aten(transform):
    torch.testing.assert_close(transform(ours), transform(theirs))


def test_a_module_and_half_precision():
    norm = RMSNorm((2, N), eps=EPS, dtype=torch.bfloat16)
    x = torch.randn(3, 5, 2, N, dtype=torch.bfloat16)
    parameters = dict(norm.named_parameters())
    y = vmap(lambda rows: functional_call(norm, parameters, (rows,)))(x)
    assert torch.equal(y, norm(x)) and y.requires_grad
    (dw,) = grad(lambda given: functional_call(norm, given, (x,)).float().sin().sum())(parameters).values()
    expected = torch.autograd.grad(norm(x).float().sin().sum(), norm.weight)[0]
    torch.testing.assert_close(dw, expected, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize(
    "transform", ["vmap", "grad", "grad of vmap", "gradients of each sample", "vjp", "jacrev"]
)
def test_transforms_inside_torch_compile_do_as_for_aten(transform):
    """Their gradients were 0."""
    torch._dynamo.reset()

    def norm(rows, weight=W[0]):
        return rms_norm(rows, (N,), weight, EPS, backend="torch")

    compiled = torch.compile(lambda: TRANSFORMS[transform](norm), backend="eager")
    torch.testing.assert_close(compiled(), TRANSFORMS[transform](theirs))


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


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize():
    tangent = torch.randn_like(X)
    (y, product), (expected, expected_product) = linearize(ours, X), linearize(theirs, X)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(product(tangent), expected_product(tangent))


@pytest.mark.parametrize("options", [{}, {"offset": 1.0}, {"bias": W[1]}, {"residual": X[1]}])
def test_forward_mode_against_finite_differences(options):
    """x and weight are recorded for autograd too, so that forward runs over backward."""

    def norm(x, weight):
        return rms_norm(x, (N,), weight, EPS, **options)

    assert gradcheck(norm, (leaf(X[0]), leaf(W[0])), check_forward_ad=True, check_batched_forward_grad=True)


@pytest.mark.parametrize("name", ["input", "weight", "bias", "residual"])
def test_each_argument_may_be_the_one_with_a_tangent(name):
    arguments = {"input": X[0], "weight": W[0], "bias": W[1], "residual": X[1]}
    tangent = torch.randn_like(arguments[name])

    def norm(argument):
        return rms_norm(normalized_shape=(N,), eps=EPS, **{**arguments, name: argument})

    with forward_ad.dual_level():
        y, out = norm(forward_ad.make_dual(arguments[name], tangent))
        tangents = tuple(forward_ad.unpack_dual(each).tangent for each in (y, out))
    _, expected = jvp(norm, (arguments[name],), (tangent,))
    torch.testing.assert_close(tangents[0], expected[0])
    if name in ("input", "residual"):
        torch.testing.assert_close(tangents[1], expected[1])


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
