# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Each kind of call on each backend: the rows of the table of docs/residual-bias-heads.md, random kinds of calls,
layouts and sizes, and kinds where kernels cannot be: in graphs of torch.compile, under torch.func, in forward mode,
beside complex numbers."""

import contextlib

import helpers
import pytest
import torch
from every_op import usual_kinds
from guarding import guarded_arrays
from helpers import BF16, DEVICE, FP16, FP32, FP64, HAS_GPU, unchanged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from variants import (
    LAYOUTS,
    VARIANTS,
    Variant,
    VariantInputs,
    check,
    check_all,
    check_residual_out,
    llama_share,
    make,
    options,
    run,
)

from tilegym_rmsnorm import BackendUnavailableError, RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends import around_kernels, torch_reference
from tilegym_rmsnorm.call.layout import as_rows, view_of_vector, viewed, views_of


@pytest.fixture
def by_kernels(backend, monkeypatch):
    """Refuse PyTorch's operations on backends with kernels, so that what passes says something of these."""
    if backend not in ("cutile", "triton"):
        return

    def refuse(*_):
        raise AssertionError(f"backend {backend!r} left it to PyTorch's operations")

    for module in (torch_reference, around_kernels):
        for name in ("rms_norm_forward", "rms_norm_backward", "forward", "backward"):
            monkeypatch.setattr(module, name, refuse, raising=False)  # what is registered as "torch" stays


@pytest.fixture
def guarded(name, backend):
    """test_triton_variants.py has the same of Triton, for each plan."""
    by_kernels = backend == "cutile" and FP64 not in VARIANTS[name]
    with guarded_arrays() if by_kernels else contextlib.nullcontext():
        yield


def skip_unless_taken(variant: Variant, backend: str) -> None:
    """float64 is for the reference."""
    if FP64 in variant and backend != "torch":
        inputs = make(variant)
        with pytest.raises(BackendUnavailableError, match="torch.float64"):
            run(variant, inputs, backend)
        pytest.skip("refused, as it says")


ROWS = torch.ones(3, 8, device=DEVICE)
NOT_FOR_KERNELS = {
    "weight": (rms_norm, {"weight": ROWS[0].double()}),
    "bias": (rms_norm, {"bias": ROWS[0].double()}),
    "residual": (rms_norm, {"residual": ROWS.double()}),
    "residual_dtype": (rms_norm, {"residual": ROWS, "residual_dtype": FP64}),
    "out_dtype": (rms_norm, {"out_dtype": FP64}),
    "dy": (rms_norm_backward, {"dy": ROWS.double()}),
    "weight of a backward": (rms_norm_backward, {"weight": ROWS[0].double()}),
    "d_residual_out": (rms_norm_backward, {"d_residual_out": ROWS.double()}),
    "dw_dtype": (rms_norm_backward, {"dw_dtype": FP64}),
    "db": (rms_norm_backward, {"weight": None, "dw_dtype": FP64, "needs_db": True}),
}


@pytest.mark.parametrize("backend", ["triton", "cutile"], indirect=True)
@pytest.mark.parametrize(("function", "change"), NOT_FOR_KERNELS.values(), ids=NOT_FOR_KERNELS)
def test_no_kernel_is_given_float64(backend, function, change):
    """One tensor or result is enough."""
    given = {"input": ROWS, "normalized_shape": 8, "weight": None}
    if function is rms_norm_backward:
        given = {"x": ROWS, "dy": ROWS, "weight": ROWS[0], "rstd": ROWS[:, 0]}
    function(**given, backend=backend)
    with pytest.raises(BackendUnavailableError, match="float32, not torch.float64"):
        function(**{**given, **change}, backend=backend)


@pytest.mark.parametrize("name", VARIANTS)
def test_forward(name, backend, poisoned_empty, by_kernels, guarded):
    variant = VARIANTS[name]
    skip_unless_taken(variant, backend)
    inputs = make(variant, seed=1)
    with unchanged(inputs):
        results = rms_norm_forward(
            inputs.x, inputs.weight, variant.eps, **options(variant, inputs), backend=backend
        )
    y, rstd = results[0], results[-1]
    normalized = None
    if variant.has_residual:
        normalized = results[1]
        check_residual_out(variant, inputs, normalized)
    check(variant, inputs, normalized, y=y, rstd=rstd)
    assert all(result.is_contiguous() for result in results)
    storages = {result.untyped_storage().data_ptr() for result in results}
    of_inputs = {t.untyped_storage().data_ptr() for t in inputs if t is not None}
    assert len(storages) == len(results) and not storages & of_inputs
    x = inputs.x if normalized is None else normalized
    if variant.casting == "llama" and x.itemsize == 2 and variant.weight_dtype != FP64:
        assert llama_share(variant, inputs, x, y) > 0.95


@pytest.mark.parametrize("name", VARIANTS)
def test_backward(name, backend, poisoned_empty, by_kernels, guarded):
    variant = VARIANTS[name]
    skip_unless_taken(variant, backend)
    inputs = make(variant, seed=2)
    with unchanged(inputs):
        results = run(variant, inputs, backend)
    assert [results[k] is None for k in ("dw", "db", "d_residual")] == [
        t is None for t in (inputs.weight, inputs.bias, inputs.residual)
    ]
    check_all(variant, inputs, results)


@pytest.mark.parametrize("side", [-1, 4])
@pytest.mark.parametrize("backend", ["cutile"], indirect=True)
def test_what_is_written_beside_an_array_is_seen(backend, side):
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    with pytest.raises(AssertionError, match="beside an array of 4 torch.float32 elements"):
        with guarded_arrays():
            array = machine_of(torch.device(DEVICE)).empty((4,), torch.float32)
            array.as_strided((1,), (1,), array.storage_offset() + side).zero_()


@pytest.mark.parametrize("name", VARIANTS)
def test_bitwise(name, backend, by_kernels):
    """Bits of a second run agree, and those from inputs that lie in memory otherwise, where the code does not depend on
    that: cutile reads packed heads as rows, and sums dw and db over other blocks then."""
    variant = VARIANTS[name]
    skip_unless_taken(variant, backend)
    inputs = make(variant, seed=3)
    packed = VariantInputs(*(None if t is None else t.contiguous() for t in inputs))
    first = run(variant, inputs, backend)
    others = [inputs] if backend == "cutile" else [inputs, packed]
    for other in others:
        for key, value in run(variant, other, backend).items():
            assert value is None or torch.equal(value, first[key]), key


@usual_kinds
def test_results_can_be_changed_in_place(op, kind, backend):
    """Autograd forbids it of views that a Function returns."""
    call = op.make(kind, seed=5)
    for result in call.public(*call.recorded(), backend=backend):
        result.mul_(2)


WITHOUT_AUTOGRAD = ["residual and bias", "weights of heads", "all of it", "bias without a weight"]


@pytest.mark.parametrize("dw_dtype", [None, torch.float32])
@pytest.mark.parametrize("name", WITHOUT_AUTOGRAD)
def test_gradients_without_autograd(name, dw_dtype, backend):
    variant = VARIANTS[name]
    inputs = make(variant, seed=5, dy_dtype=torch.float32)  # not y's
    given = options(variant, inputs)
    *outputs, rstd = rms_norm_forward(inputs.x, inputs.weight, variant.eps, **given, backend=backend)
    normalized = outputs[-1] if variant.has_residual else inputs.x
    dx, dw, db = rms_norm_backward(
        normalized,
        inputs.dy,
        inputs.weight,
        rstd,
        offset=variant.offset,
        casting=variant.casting,
        d_residual_out=inputs.d_residual_out,
        dw_dtype=dw_dtype,
        needs_db=True,
        backend=backend,
    )
    # dx is that of what was normalized: alpha is the caller's
    vector_dtype = dw_dtype or (variant.weight_dtype if inputs.weight is not None else normalized.dtype)
    of_them = variant._replace(
        dtype=normalized.dtype, alpha=1.0, weight_dtype=vector_dtype, bias_dtype=vector_dtype
    )
    results = {"dx": dx, "db": db} if dw is None else {"dx": dx, "dw": dw, "db": db}
    check(of_them, inputs, normalized, **results)


DTYPES = st.sampled_from((BF16, FP16, FP32))
MAYBE = st.none() | DTYPES
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=5)
COLUMNS = st.sampled_from((1, 7, 16, 33, 64, 128))


@st.composite
def variants(draw) -> Variant:
    leading = draw(SIZES)
    residual_dtype = draw(MAYBE)
    return Variant(
        dtype=draw(DTYPES),
        size=(*leading, draw(COLUMNS)),
        weight=draw(st.sampled_from(("none", "vector", "heads"))),
        weight_dtype=draw(DTYPES),
        bias_dtype=draw(MAYBE),
        residual_dtype=residual_dtype,
        residual_out_dtype=draw(MAYBE) if residual_dtype else None,
        alpha=draw(st.sampled_from((1.0, 0.22, -2.0))) if residual_dtype else 1.0,
        out_dtype=draw(MAYBE),
        offset=draw(st.sampled_from((0.0, 1.0, -0.5))),
        casting=draw(st.sampled_from(("once", "llama"))),
        layout=draw(st.sampled_from(tuple(LAYOUTS))),
    )


@pytest.mark.parametrize("backend", ["torch", "triton", "cutile"], indirect=True)
@settings(
    max_examples=200 if HAS_GPU else 40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(variant=variants(), seed=st.integers(0, 2**31))
def test_any_call(backend, variant, seed):
    inputs = make(variant, seed=seed)
    check_all(variant, inputs, run(variant, inputs, backend))


@st.composite
def tensors_of_one_shape(draw) -> tuple[int, int, list[torch.Tensor]]:
    """n, heads and tensors, each some view of some memory."""
    shape = (*draw(SIZES), draw(st.sampled_from((1, 2, 5))))
    n = shape[-1]
    heads = shape[-2] if draw(st.booleans()) and shape[-2] > 1 else 0
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(len(shape))))
        parent = torch.arange(6 * torch.Size(shape).numel()).view(*(shape[d] for d in order), 6)
        view = parent[..., draw(st.integers(0, 5))].permute(*(order.index(d) for d in range(len(shape))))
        kind = draw(st.sampled_from(("as it is", "packed", "packed in order", "expanded")))
        if kind != "as it is":
            packed = view.permute(*order).contiguous()
            view = packed.permute(*(order.index(d) for d in range(len(shape))))
        if kind == "packed in order":
            view = view.contiguous()
        if kind == "expanded":
            view = view[:1].expand(shape)
        tensors.append(view)
    return n, heads, tensors


def arranged(n: int, heads: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return viewed(tensors, views_of(n, heads, tensors))


@settings(max_examples=400, deadline=None)
@given(tensors_of_one_shape())
def test_what_backends_are_given(case):
    """Values and their order stay, in one layout of contract.py."""
    n, heads, tensors = case
    *given, absent = arranged(n, heads, *tensors, None)
    assert absent is None
    for tensor, rows in zip(tensors, given, strict=True):
        assert torch.equal(rows.flatten(), tensor.flatten())
        assert rows.shape == given[0].shape and rows.stride(-1) == 1 and rows.shape[-1] == n
        if rows.ndim == 2:
            assert rows.stride(0) >= n and not heads
        else:
            assert rows.ndim == 4 and (not heads or rows.shape[2] == heads)
            assert all(s > 0 for e, s in zip(rows.shape, rows.stride(), strict=True) if e > 1)


VIEWS = {  # what is read in place, and in what shape
    "a q slice": (lambda: torch.empty(2, 3, 3, 4, 8)[:, :, 0], (1, 6, 4, 8)),
    "transposed": (lambda: torch.empty(2, 4, 3, 8).transpose(1, 2), (2, 3, 4, 8)),
    "rows of a wider tensor": (lambda: torch.empty(6, 4, 16)[..., :8], (24, 8)),
    "every other head": (lambda: torch.empty(2, 3, 8, 8)[:, :, ::2], (24, 8)),
    "a sequence without its first token": (lambda: torch.empty(2, 257, 8)[:, 1:], (2, 256, 1, 8)),
    "few tokens without the first": (lambda: torch.empty(2, 256, 8)[:, 1:], (1, 2, 255, 8)),
    "heads before a sequence": (lambda: torch.empty(2, 300, 4, 8).transpose(1, 2), (2, 4, 300, 8)),
    "sequence first": (lambda: torch.empty(3, 2, 4, 8).transpose(0, 1), (2, 3, 4, 8)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_not_copied(name):
    make_view, shape = VIEWS[name]
    view = make_view()
    (rows,) = arranged(8, 0, view)
    assert rows.data_ptr() == view.data_ptr()
    assert rows.shape == shape


UNREADABLE = {  # n, and what is copied
    "rows that are one": (8, lambda: torch.randn(1, 8).expand(6, 8)),
    "rows that overlap": (8, lambda: torch.randn(20).unfold(0, 8, 2)),
    "rows of a batch that overlap": (8, lambda: torch.randn(2, 20).unfold(1, 8, 2)),
    "heads that overlap": (8, lambda: torch.randn(2, 3, 20).unfold(2, 8, 4)),
    "columns apart": (8, lambda: torch.randn(6, 16)[:, ::2]),
    "columns of a batch apart": (8, lambda: torch.randn(2, 3, 16)[..., ::2]),
    "one column of several": (1, lambda: torch.randn(6, 2)[:, ::2]),
    "one column of several of a batch": (1, lambda: torch.randn(2, 3, 2)[..., ::2]),
    "one column of several of heads": (1, lambda: torch.randn(2, 4, 3, 2)[..., ::2].transpose(1, 2)),
    "one column of any stride": (1, lambda: torch.randn(6).as_strided((6, 1), (1, 7))),
    "one column of any stride of a batch": (1, lambda: torch.randn(6).as_strided((2, 3, 1), (3, 1, 7))),
    "one element of any stride": (1, lambda: torch.randn(1).as_strided((1, 1, 1), (0, 0, 0))),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_is_copied(name):
    """Kernels read rows whose columns follow one another and that do not overlap; interpreters would take any."""
    n, make_view = UNREADABLE[name]
    view = make_view()
    for rows in (*arranged(n, 0, view), as_rows(view, n)):
        assert torch.equal(rows.flatten(), view.flatten()) and rows.data_ptr() != view.data_ptr()
        assert rows.stride(-1) == 1 and rows.stride(-2) >= n


@pytest.mark.parametrize(
    ("heads", "vector"),
    [
        (0, torch.randn(1).as_strided((1,), (7,))),
        (0, torch.randn(1).as_strided((1, 1), (7, 7))),
        (3, torch.randn(3).as_strided((3, 1), (1, 7))),
        (3, torch.randn(3).as_strided((3, 1, 1), (1, 7, 7))),
    ],
)
def test_a_weight_of_one_column_has_stride_1(heads, vector):
    """PyTorch takes any stride of it for contiguous."""
    assert vector.is_contiguous()
    (arranged,) = viewed([vector], [view_of_vector(vector, 1, heads)])
    assert arranged.shape == ((3, 1) if heads else (1,)) and arranged.stride(-1) == 1
    assert torch.equal(arranged.flatten(), vector.flatten())


def test_q_beside_the_gradient_that_attention_leaves():
    q, dy = torch.empty(2, 3, 3, 4, 8)[:, :, 0], torch.empty(2, 4, 3, 8).transpose(1, 2)
    for heads in (0, 4):
        rows = arranged(8, heads, q, dy, None)
        assert [each.data_ptr() for each in rows[:2]] == [q.data_ptr(), dy.data_ptr()]
        assert rows[0].shape == (2, 3, 4, 8) and rows[2] is None


@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 8)])
def test_four_dimensions_that_do_not_merge_are_copied(shape):
    view = torch.empty(2 * 2, 3 * 2, 5 * 2, 7 * 2, 8)[::2, ::2, ::2, ::2]
    (rows,) = arranged(8, 0, view)
    assert rows.shape == (210, 8) and rows.is_contiguous()


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


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(
    "change", [lambda rows: rows + 1j, lambda rows: rows[..., :0]], ids=["complex", "empty"]
)
def test_results_are_contiguous(change, has_residual):
    """PyTorch's operations keep the order of strides."""
    x, residual = (change(torch.randn(3, 4, 8, device=DEVICE).transpose(0, 1)) for _ in range(2))
    results = rms_norm(x, x.shape[-1], residual=residual if has_residual else None, backend="torch")
    assert all(result.is_contiguous() for result in (results if has_residual else (results,)))


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
