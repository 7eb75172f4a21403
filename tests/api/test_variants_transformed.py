# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Each kind of call where kernels cannot be: in graphs of torch.compile, under torch.func, in forward mode, beside
complex numbers."""

from __future__ import annotations

import helpers
import pytest
import torch
from helpers import BF16, DEVICE, FP32
from torch.func import functional_call, jvp, vmap
from variants import VARIANTS, Variant, check, check_residual_out, make, options

from tilegym_rmsnorm import RMSNorm, rms_norm

NAMES = ("x", "weight", "bias", "residual")


def call(variant, inputs, backend="torch"):
    """The norm as a function of the tensors that there are, and these."""
    names = [name for name in NAMES if getattr(inputs, name) is not None]

    def norm(*tensors):
        given = inputs._replace(**dict(zip(names, tensors, strict=True)))
        return rms_norm(
            given.x, variant.n, given.weight, variant.eps, **options(variant, given), backend=backend
        )

    return norm, [getattr(inputs, name) for name in names]


# Inductor does all that aot_eager does, and compiles C++: of that the fast job has none. So aot_eager has a few kinds,
# Inductor every second one, and with --every-config both have all.
TRACED = [
    *(
        (name, "aot_eager")
        for name in VARIANTS
        if helpers.every_config or name in ("bias", "residual", "weights of heads", "all of it")
    ),
    *(
        pytest.param(name, "inductor", marks=pytest.mark.slow)
        for number, name in enumerate(VARIANTS)
        if helpers.every_config or number % 2 == 0
    ),
]


@pytest.mark.parametrize(("name", "compiler"), TRACED)
def test_traced_by_torch_compile(name, compiler):
    """One graph is made. Inductor drops a rounding that a widening follows: what is normalized must be residual_out."""
    torch._dynamo.reset()
    variant = VARIANTS[name]
    norm, tensors = call(variant, inputs := make(variant))
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = torch.compile(norm, backend=compiler, fullgraph=True)(*leaves)
    y, residual_out = results if variant.has_residual else (results, None)
    if residual_out is None:
        y.backward(inputs.dy)
    else:
        torch.autograd.backward((y, residual_out), (inputs.dy, inputs.d_residual_out))
        residual_out = residual_out.detach()
        check_residual_out(variant, inputs, residual_out)
    check(variant, inputs, residual_out, y=y.detach())
    names = [name for name in NAMES if getattr(inputs, name) is not None]
    results = {"x": "dx", "weight": "dw", "bias": "db", "residual": "d_residual"}
    gradients = {results[name]: leaf.grad for name, leaf in zip(names, leaves, strict=True)}
    check(variant, inputs, residual_out, **gradients)


# How a call comes to be composed of PyTorch's operations: norm(x, residual), and a function that calls it so.
COMPOSED = {
    "compiled": lambda norm, *rows: torch.compile(norm, backend="aot_eager", fullgraph=True)(*rows),
    "compiled, differentiated": lambda norm, *rows: torch.compile(norm, backend="aot_eager", fullgraph=True)(
        *(row.detach().requires_grad_() for row in rows)
    ),
    "forward mode": lambda norm, *rows: jvp(norm, rows, rows)[0],
    "mapped": lambda norm, *rows: [each[0] for each in vmap(norm)(*(row[None] for row in rows))],
    "complex": lambda norm, *rows: norm(*(row + 1j for row in rows)),
    "rows of no elements": lambda norm, *rows: norm(*(row[..., :0] for row in rows)),
}


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("way", COMPOSED)
def test_results_are_contiguous(way, has_residual):
    """PyTorch's operations keep the order of strides: `view` then failed in graphs alone."""
    torch._dynamo.reset()
    x, residual = (torch.randn(3, 4, 8, device=DEVICE).transpose(0, 1) for _ in range(2))

    def norm(x, residual=None):
        results = rms_norm(x, x.shape[-1], None, 1e-3, residual=residual, backend="torch")
        results = results if has_residual else (results,)
        return tuple(result.view(-1, result.shape[-1] or 1).view(result.shape) for result in results)

    results = COMPOSED[way](norm, x, *[residual] * has_residual)
    assert all(result.is_contiguous() for result in results)
    if way not in ("complex", "rows of no elements"):
        torch.testing.assert_close(results, norm(x, *[residual] * has_residual))


def test_complex():
    x, residual = (torch.randn(3, 8, dtype=torch.complex64, device=DEVICE) for _ in range(2))
    y, residual_out = rms_norm(x, 8, None, 1e-3, residual=residual, residual_alpha=2.0)
    assert torch.equal(residual_out, 2 * x + residual)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(residual_out, (8,), None, 1e-3))


def test_module(backend):
    """Its options reach the function, those of a residual where there is one."""
    variant = Variant(BF16, (2, 3, 4, 16), "heads", BF16, BF16, BF16, FP32, 0.5, FP32, 1.0, "llama", eps=0.25)
    inputs = make(variant)
    module = RMSNorm(
        16,
        0.25,
        device=DEVICE,
        dtype=BF16,
        offset=1.0,
        bias=True,
        heads=4,
        residual_alpha=0.5,
        residual_dtype=FP32,
        out_dtype=FP32,
        casting="llama",
        backend=backend,
    )
    assert torch.equal(module.weight, torch.zeros(4, 16, device=DEVICE, dtype=BF16))
    assert "heads=4, residual_alpha=0.5, residual_dtype=torch.float32, out_dtype=torch.float32" in repr(
        module
    )
    parameters = {"weight": inputs.weight, "bias": inputs.bias}
    module.load_state_dict(parameters)
    given = options(variant, inputs)
    y, residual_out = module(inputs.x, inputs.residual)
    expected = rms_norm(inputs.x, 16, inputs.weight, 0.25, **given, backend=backend)
    assert torch.equal(y, expected[0]) and torch.equal(residual_out, expected[1])
    for name in ("residual", "residual_alpha", "residual_dtype"):
        del given[name]
    assert torch.equal(
        module(inputs.x), rms_norm(inputs.x, 16, inputs.weight, 0.25, **given, backend=backend)
    )
    functional = functional_call(module, parameters, (inputs.x, inputs.residual))
    assert torch.equal(functional[0], y)


def test_configured_module():
    configured = RMSNorm.configured(heads=2, residual_alpha=2, out_dtype=FP32)
    module = configured(8, dtype=BF16)
    assert module.weight.shape == (2, 8) and module.residual_alpha == 2.0 and module.out_dtype is FP32
    with pytest.raises(ValueError, match="heads: expected at least 1, or None, got 0"):
        RMSNorm.configured(heads=0)
    with pytest.raises(TypeError, match="heads: expected an int or None, got True"):
        RMSNorm(8, heads=True)
    for without_weight in (
        lambda: RMSNorm(8, heads=4, elementwise_affine=False),
        lambda: RMSNorm.configured(elementwise_affine=False)(8, heads=4),
        lambda: RMSNorm.configured(heads=4)(8, with_scale=False),
    ):
        with pytest.raises(
            ValueError, match=r"heads: expected None without a weight \(elementwise_affine=False"
        ):
            without_weight()
    with pytest.raises(TypeError, match="out_dtype: expected None or a dtype of torch.float16"):
        RMSNorm.configured(out_dtype=torch.int8)
    with pytest.raises(ValueError, match="residual_alpha: expected a finite number"):
        RMSNorm(8, residual_alpha=float("inf"))
