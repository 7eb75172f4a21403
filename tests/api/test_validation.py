# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Arguments that do not fit are refused before a backend is even looked for."""

import inspect
import math
import re
import sys
import typing
import warnings

import pytest
import torch

import tilegym_rmsnorm as tr
from tilegym_rmsnorm.backends import registry

M, N = 3, 8
X, DY, W, RSTD = torch.ones(M, N), torch.ones(M, N), torch.ones(N), torch.ones(M)
META = torch.ones(N, device="meta")
SPARSE = X.to_sparse()


def _norm(**kwargs):
    arguments = {"input": X, "normalized_shape": (N,), "weight": W, "eps": 1e-6, **kwargs}
    return tr.rms_norm(**arguments)


def _forward(**kwargs):
    arguments = {"x": X, "weight": W, "eps": 1e-6, **kwargs}
    return tr.rms_norm_forward(**arguments)


def _backward(**kwargs):
    arguments = {"x": X, "dy": DY, "weight": W, "rstd": RSTD, **kwargs}
    return tr.rms_norm_backward(**arguments)


def _backward_torch(**kwargs):
    arguments = {"x": X, "dy": DY, "weight": W, "rstd": RSTD, **kwargs}
    return tr.rms_norm_backward_torch(**arguments)


def _rstd_torch(**kwargs):
    return tr.compute_rms_norm_rstd_torch(**{"x": X, **kwargs})


BAD_NORM = [
    ({"input": [1.0]}, TypeError, "input: expected a torch.Tensor, got list"),
    (
        {"input": X.long()},
        TypeError,
        "input: expected a dtype of torch.float16, torch.bfloat16, torch.float32",
    ),
    ({"input": X.to(torch.float8_e4m3fn)}, TypeError, "got torch.float8_e4m3fn"),
    (
        {"input": torch.nested.nested_tensor([X, X[:1]])},
        TypeError,
        "input: expected no nested tensor, or one of layout torch.jagged, but its values(), got layout",
    ),
    ({"input": torch.ones(())}, ValueError, "input: expected at least one dimension"),
    (
        {"normalized_shape": 4},
        ValueError,
        "input: expected shape (*, 4), as normalized_shape says, got (3, 8)",
    ),
    ({"normalized_shape": (8, 3)}, ValueError, "input: expected shape (*, 8, 3), as"),
    ({"normalized_shape": (1, 3, 8)}, ValueError, "input: expected shape (*, 1, 3, 8), as"),
    ({"normalized_shape": -1}, ValueError, "normalized_shape: expected sizes of at least 1, got (-1,)"),
    ({"normalized_shape": ()}, ValueError, "normalized_shape: expected at least one dimension, got ()"),
    (
        {"input": X.long()},
        TypeError,
        "torch.complex64, torch.complex128, got torch.int64: tokens in place of embeddings?",
    ),
    *(
        ({"normalized_shape": size}, TypeError, f"expected an int or a sequence of ints, got {size!r}")
        for size in (None, "8", 8.0, (8.0,), [8.0], True, (True,))
    ),
    (
        {"normalized_shape": torch.tensor([3, 8])},
        TypeError,
        "normalized_shape: expected an int or a sequence of ints, got a tensor of shape (2,)",
    ),
    (
        {"normalized_shape": W},
        TypeError,
        "got a tensor of shape (8,); rms_norm takes input, normalized_shape, weight, eps in this order",
    ),
    (
        {"normalized_shape": W.to(torch.complex64)},
        TypeError,
        "normalized_shape: expected an int or a sequence of ints, "
        "got a tensor of shape (8,); rms_norm takes input, normalized_shape, weight, eps in this order",
    ),
    (
        {"normalized_shape": (torch.tensor(8),)},
        TypeError,
        "normalized_shape: expected an int or a sequence of ints, got a tuple with tensors",
    ),
    ({"input": SPARSE}, TypeError, "input: expected layout torch.strided, got torch.sparse_coo"),
    ({"residual": SPARSE}, TypeError, "residual: expected layout torch.strided, got torch.sparse_coo"),
    ({"normalized_shape": (3, 8)}, ValueError, "weight: expected shape (3, 8), got (8,)"),
    ({"residual": torch.ones(M, 1)}, ValueError, "residual: expected the shape of input, (3, 8), got (3, 1)"),
    ({"residual": DY.long()}, TypeError, "residual: expected a dtype of torch.float16, torch.bfloat16"),
    ({"residual": DY + 0j}, TypeError, "residual: expected a dtype of torch.float16, torch.bfloat16"),
    (
        {"weight": torch.ones(2, 8), "input": torch.ones(2, 3, 8)},
        ValueError,
        "weight: expected shape (8,), or (3, 8), since input of shape (2, 3, 8) has 3 heads, got (2, 8)",
    ),
    (
        {"weight": torch.ones(2, 8), "input": torch.ones(3, 1, 8)},
        ValueError,
        "weight: expected shape (8,), or (1, 8), since input of shape (3, 1, 8) has 1 head, got (2, 8)",
    ),
    ({"weight": torch.ones(3, 8), "bias": W}, ValueError, "bias: expected shape (3, 8), got (8,)"),
    (
        {"weight": torch.ones(2, 8), "input": torch.ones(8)},
        ValueError,
        "weight: expected shape (8,), got (2, 8)",
    ),
    ({"residual": DY.to("meta")}, ValueError, "residual: expected the device of input, cpu, got meta"),
    ({"residual": 1.0}, TypeError, "residual: expected a torch.Tensor, got float"),
]
BAD_VECTORS = [
    (torch.ones(7), ValueError, "expected shape (8,), got (7,)"),
    (torch.ones(9), ValueError, "expected shape (8,), got (9,)"),
    (torch.ones(1, 1, 8), ValueError, "expected shape (8,), got (1, 1, 8)"),
    (torch.ones(()), ValueError, "expected shape (8,), got ()"),
    (W.long(), TypeError, "expected a dtype of torch.float16, torch.bfloat16"),
    (META, ValueError, "expected the device of {x}, cpu, got meta"),
    (W.to_sparse(), TypeError, "expected layout torch.strided, got torch.sparse_coo"),
    ([1.0] * 8, TypeError, "expected a torch.Tensor or None, got list"),
]
BAD_PARAMETERS = [
    ({"casting": "gemma"}, ValueError, "casting: expected one of 'once', 'llama', got 'gemma'"),
    ({"casting": None}, ValueError, "casting: expected one of 'once', 'llama', got None"),
    ({"offset": "1"}, TypeError, "offset: expected a finite number, got '1'"),
    ({"offset": None}, TypeError, "offset: expected a finite number, got None"),
    ({"offset": W}, TypeError, "offset: expected a finite number, got a tensor of shape (8,)"),
    ({"casting": W}, ValueError, "casting: expected one of 'once', 'llama', got a tensor of shape (8,)"),
    ({"offset": math.nan}, ValueError, "offset: expected a finite number, got nan"),
    ({"offset": -math.inf}, ValueError, "offset: expected a finite number, got -inf"),
]
BAD_RESIDUALS = [
    ({"residual_alpha": 0.5}, ValueError, "residual_alpha: expected 1.0 without a residual, got 0.5"),
    (
        {"residual": DY, "residual_alpha": math.inf},
        ValueError,
        "residual_alpha: expected a finite number, got inf",
    ),
    ({"residual": DY, "residual_alpha": "1"}, TypeError, "residual_alpha: expected a finite number, got '1'"),
    ({"residual_alpha": True}, TypeError, "residual_alpha: expected a finite number, got True"),
    (
        {"residual_alpha": torch.ones(2)},
        TypeError,
        "residual_alpha: expected a finite number, got a tensor of shape (2,)",
    ),
    (
        {"residual_dtype": torch.float32},
        ValueError,
        "residual_dtype: expected None without a residual, got torch.float32",
    ),
    (
        {"residual": DY, "residual_dtype": torch.int32},
        TypeError,
        "residual_dtype: expected None or a dtype of torch.float16, torch.bfloat16",
    ),
    ({"residual": DY, "residual_dtype": "float32"}, TypeError, "residual_dtype: expected None or a dtype of"),
    ({"out_dtype": "float32"}, TypeError, "torch.float64, got 'float32'"),
    ({"out_dtype": torch.int64}, TypeError, "out_dtype: expected None or a dtype of torch.float16"),
    ({"out_dtype": torch.float8_e4m3fn}, TypeError, "got torch.float8_e4m3fn"),
    ({"out_dtype": torch.complex64}, TypeError, "out_dtype: expected None or a dtype of torch.float16"),
]
BAD_EPS = [
    ({"eps": "1e-6"}, TypeError, "eps: expected a finite number, at least 0, or None, got '1e-6'"),
    ({"eps": True}, TypeError, "eps: expected a finite number, at least 0, or None, got True"),
    (
        {"eps": torch.tensor(1e-6)},
        TypeError,
        "eps: expected a finite number, at least 0, or None, got a tensor of shape ()",
    ),
    ({"eps": DY}, TypeError, "got a tensor of shape (3, 8); a residual is given by name: residual="),
    ({"eps": -1e-6}, ValueError, "eps: expected a finite number, at least 0, or None, got -1e-06"),
    ({"eps": math.nan}, ValueError, "eps: expected a finite number"),
    ({"eps": math.inf}, ValueError, "eps: expected a finite number"),
    ({"eps": 10**400}, ValueError, "eps: expected a finite number, at least 0, or None, got a number beyond"),
]
BAD_BACKWARD = [
    ({"dy": torch.ones(M, N - 1)}, ValueError, "dy: expected the shape of x, (3, 8), got (3, 7)"),
    ({"dy": torch.ones(N)}, ValueError, "dy: expected the shape of x, (3, 8), got (8,)"),
    ({"dy": DY.long()}, TypeError, "dy: expected a dtype of torch.float16, torch.bfloat16"),
    ({"d_residual_out": DY[:2]}, ValueError, "d_residual_out: expected the shape of x, (3, 8), got (2, 8)"),
    (
        {"d_residual_out": DY.to("meta")},
        ValueError,
        "d_residual_out: expected the device of x, cpu, got meta",
    ),
    ({"d_residual_out": 0.0}, TypeError, "d_residual_out: expected a torch.Tensor, got float"),
    ({"dw_dtype": torch.int8}, TypeError, "dw_dtype: expected None or a dtype of torch.float16"),
    ({"dw_dtype": W}, TypeError, "torch.float64, got a tensor of shape (8,)"),
    ({"needs_db": "no"}, TypeError, "needs_db: expected a bool, got 'no'"),
    ({"needs_db": 1}, TypeError, "needs_db: expected a bool, got 1"),
    ({"needs_db": DY}, TypeError, "needs_db: expected a bool, got a tensor of shape (3, 8)"),
    ({"dy": DY.to("meta")}, ValueError, "dy: expected the device of x, cpu, got meta"),
    ({"dy": SPARSE}, TypeError, "dy: expected layout torch.strided, got torch.sparse_coo"),
    ({"rstd": RSTD.to_sparse()}, TypeError, "rstd: expected layout torch.strided, got torch.sparse_coo"),
    ({"dy": None}, TypeError, "dy: expected a torch.Tensor, got NoneType"),
    (
        {"rstd": torch.ones(M + 1)},
        ValueError,
        "rstd: expected shape (3,), one element per row of x, got (4,)",
    ),
    (
        {"rstd": torch.ones(M, 1)},
        ValueError,
        "rstd: expected shape (3,), one element per row of x, got (3, 1)",
    ),
    (
        {"rstd": RSTD.double()},
        TypeError,
        "rstd: expected torch.float32 for torch.float32 x, got torch.float64",
    ),
    ({"x": X.half(), "dy": DY.half(), "rstd": RSTD.half()}, TypeError, "rstd: expected torch.float32"),
    ({"x": X.double(), "dy": DY.double()}, TypeError, "rstd: expected torch.float64 for torch.float64 x"),
    ({"rstd": RSTD.to("meta")}, ValueError, "rstd: expected the device of x, cpu, got meta"),
    ({"rstd": 1.0}, TypeError, "rstd: expected a torch.Tensor, got float"),
]
BAD_X = [
    ({"x": X.to(torch.complex64)}, TypeError, "got torch.complex64"),
    (
        {"x": torch.nested.nested_tensor([X, X[:1]], layout=torch.jagged)},
        TypeError,
        "x: expected no nested tensor, but its values(), got layout torch.jagged",
    ),
    ({"x": torch.ones(3, 0)}, ValueError, "expected at least one element per row"),
    ({"x": torch.ones(0, 0)}, ValueError, "expected at least one element per row"),
    ({"x": X.long()}, TypeError, "x: expected a dtype of"),
    ({"x": 1.0}, TypeError, "x: expected a torch.Tensor"),
    ({"x": SPARSE}, TypeError, "x: expected layout torch.strided, got torch.sparse_coo"),
]

CASES = (
    [(_norm, *case) for case in BAD_NORM + BAD_PARAMETERS + BAD_RESIDUALS + BAD_EPS]
    + [(_forward, *case) for case in BAD_X + BAD_PARAMETERS + BAD_RESIDUALS + BAD_EPS]
    + [
        (call, *case)
        for call in (_backward, _backward_torch)
        for case in BAD_X + BAD_PARAMETERS + BAD_BACKWARD
    ]
    + [(_rstd_torch, *case) for case in BAD_X + BAD_EPS]
    + [
        (call, {name: vector}, error, f"{name}: {text.format(x='input' if call is _norm else 'x')}")
        for call, names in (
            (_norm, ("weight", "bias")),
            (_forward, ("weight", "bias")),
            (_backward, ("weight",)),
            (_backward_torch, ("weight",)),
        )
        for name in names
        for vector, error, text in BAD_VECTORS
    ]
)


@pytest.mark.parametrize(("call", "arguments", "error", "text"), CASES)
def test_refused_with_name_expected_and_given(call, arguments, error, text, monkeypatch):
    monkeypatch.setattr(registry, "dispatch", lambda *_: pytest.fail("looked for a backend"))
    with pytest.raises(error, match=re.escape(text)):
        call(**arguments)


@pytest.mark.parametrize(
    "name", ["eps", "offset", "residual_alpha", "normalized_shape", "out_dtype", "casting"]
)
def test_no_value_of_a_tensor_is_read_to_refuse_it(name):
    """Printing a tensor waits for its device; one on the meta device has no values."""
    with pytest.raises((TypeError, ValueError), match=r"got a tensor of shape \(3, 8\)"):
        _norm(**{name: DY.to("meta")})


def named(function):
    """The defaults of the arguments that are given by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_functions_of_a_pair_take_the_same():
    forward, backward = named(tr.rms_norm_forward), named(tr.rms_norm_backward)
    assert forward == named(tr.rms_norm)
    assert backward.pop("backend") is None and backward == named(tr.rms_norm_backward_torch)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
@pytest.mark.parametrize(
    "function", [tr.rms_norm, tr.rms_norm_forward, tr.rms_norm_backward, tr.rms_norm_backward_torch]
)
def test_type_checkers_see_what_a_function_takes(function):
    first, second = map(named, typing.get_overloads(function))
    assert [*first] == [*second] == [*named(function)]


@pytest.mark.parametrize("call", [_norm, _forward, _backward, _backward_torch, _rstd_torch])
def test_the_arguments_that_the_cases_change_are_good(call):
    call()


@pytest.mark.parametrize("call", [_norm, _forward, _backward])
def test_an_unknown_backend_is_refused(call):
    with pytest.raises(ValueError, match="backend: expected one of 'cutile', 'triton', 'torch', 'auto'"):
        call(backend="Triton")


@pytest.mark.parametrize("eps", [0, 0.0, 1, 1e-6, None])
def test_numbers_of_any_kind_are_eps(eps):
    expected = torch.nn.functional.rms_norm(X, (N,), W, eps)
    assert torch.equal(_norm(eps=eps), expected)


class Index:
    """An integer like numpy's."""

    def __index__(self):
        return N


IN_GRAPHS = [
    ({"normalized_shape": W}, "normalized_shape"),
    ({"normalized_shape": 8.0}, "normalized_shape"),
    ({"weight": torch.ones(7)}, "weight"),
    ({"bias": W.long()}, "bias"),
    ({"eps": -1e-6}, "eps"),
    ({"eps": "1e-6"}, "eps"),
    ({"offset": math.nan}, "offset"),
    ({"casting": "gemma"}, "casting"),
    ({"residual": DY[:2]}, "residual"),
    ({"out_dtype": "float32"}, "out_dtype"),
    ({"backend": "Triton"}, "backend"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "name"), IN_GRAPHS, ids=str)
def test_refused_in_the_first_compiled_call(arguments, name):
    torch._dynamo.reset()
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*, got ") as refused:
        torch.compile(lambda x: _norm(**{"input": x, **arguments}), backend="eager")(X)
    with pytest.raises(refused.type, match=re.escape(str(refused.value))):
        _norm(**arguments)


@pytest.mark.parametrize("normalized_shape", [N, (N,), [N], torch.Size([N]), range(N, N + 1), Index()])
def test_normalized_shape_is_an_int_or_any_sequence(normalized_shape):
    assert _norm(normalized_shape=normalized_shape).shape == X.shape


def _traced(function, *inputs):
    """The trace of a function, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(function, inputs)
    return traced, [
        str(each.message) for each in caught if issubclass(each.category, torch.jit.TracerWarning)
    ]


TRACED = {
    "a row's shape": lambda x, _: tr.RMSNorm(N)(x),
    "two dimensions": lambda x, _: tr.RMSNorm((M, N), bias=True)(x),
    "no weight": lambda x, _: tr.RMSNorm(N, elementwise_affine=False)(x),
    "residual": lambda x, other: tr.RMSNorm(N)(x, other),
    "x's own shape": lambda x, _: tr.rms_norm(x, x.shape[-1:], W),
    "x's width": lambda x, _: tr.rms_norm(x, x.shape[-1], W),
    "x's width in a list": lambda x, _: tr.rms_norm(x, [x.shape[-1]], W),
    "x's own size": lambda x, _: tr.rms_norm(x, [x.shape[-1]], W),
    "forward": lambda x, _: tr.rms_norm_forward(x, W),
    "backward": lambda x, dy: tr.rms_norm_backward(x, dy, W, tr.compute_rms_norm_rstd_torch(x)),
}


@pytest.mark.parametrize("name", TRACED)
def test_checks_leave_no_warning_in_a_trace(name):
    """Each printed five lines of "the trace might not generalize", nn.RMSNorm none. Some were refused."""
    traced, found = _traced(TRACED[name], torch.randn(2, M, N), torch.randn(2, M, N))
    assert found == []
    inputs = torch.randn(5, M, N), torch.randn(5, M, N)
    torch.testing.assert_close(traced(*inputs), TRACED[name](*inputs))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: tr.rms_norm(x, (4,), None), r"input: expected shape \(\*, 4\).*, got \(3, 8\)"),
        (
            lambda x: tr.rms_norm(x, (-N,), None),
            r"normalized_shape: expected sizes of at least 1, got \(-8,\)",
        ),
        (lambda x: tr.rms_norm(x, (N,), W[1:]), r"weight: expected shape \(8,\), got \(7,\)"),
        (lambda x: tr.rms_norm(x, (N,), W, residual=x[1:]), r"residual: .*input, \(3, 8\), got \(2, 8\)"),
        (lambda x: tr.rms_norm_backward(x, x, W, RSTD[1:]), r"rstd: expected shape \(3,\).*, got \(2,\)"),
    ],
)
def test_what_is_traced_is_checked(function, text):
    with pytest.raises(ValueError, match=text):
        torch.jit.trace(function, (X,))
    assert torch.jit.is_tracing() is False
    assert tr.rms_norm(X, (N,), W).shape == X.shape


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"eps": True, "offset": True}, "eps"),
        ({"residual_alpha": "1", "eps": True}, "residual_alpha"),
        ({"out_dtype": torch.int8, "eps": True}, "out_dtype"),
        ({"casting": "no", "out_dtype": torch.int8}, "casting"),
        ({"weight": W[:2], "casting": "no"}, "weight"),
    ],
)
def test_of_two_arguments_that_do_not_fit_the_same_one_is_named(arguments, named):
    with pytest.raises((TypeError, ValueError), match=f"^{named}: expected"):
        _norm(**arguments)
