# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Refusals of the adapters before anything is launched: the error names the argument, what was expected and given."""

import re

import pytest
import torch
from helpers import BF16

from tilegym_rmsnorm.integrations import apex, flashinfer, liger, quack, tilegym, transformer_engine, vllm

X, W, RSTD = torch.randn(3, 8), torch.ones(8), torch.ones(3)
FUNCTIONS = {
    tilegym.rms_norm: {"input": X, "normalized_shape": None, "weight": W, "eps": 1e-6},
    tilegym.rms_norm_backward: {"x": X, "dy": X, "weight": W, "rstd": RSTD},
    tilegym.rms_norm_backward_torch: {"x": X, "dy": X, "weight": W, "rstd": RSTD},
    tilegym.compute_rms_norm_rstd_torch: {"x": X, "eps": 1e-6},
    quack.rmsnorm: {"x": X, "weight": W, "residual": X},
    liger.liger_rms_norm: {"X": X, "W": W, "eps": 1e-6},
    liger.liger_fused_add_rms_norm: {"X": X, "R": X, "W": W, "eps": 1e-6},
    vllm.rms_norm: {"x": X, "weight": W, "epsilon": 1e-6},
    flashinfer.rmsnorm: {"input": X, "weight": W, "eps": 1e-6},
    flashinfer.gemma_rmsnorm: {"input": X, "weight": W, "eps": 1e-6},
    apex.fused_rms_norm: {"input": X, "normalized_shape": 8},
    apex.fused_rms_norm_affine: {"input": X, "weight": W, "normalized_shape": 8},
    apex.mixed_dtype_fused_rms_norm_affine: {"input": X, "weight": W, "normalized_shape": 8},
}
MODULES = {
    tilegym.TileRMSNorm: "hidden_size",
    tilegym.TileRMSNormForGemma3: "dim",
    quack.QuackRMSNorm: "dim",
    liger.LigerRMSNorm: "hidden_size",
    liger.LigerRMSNormForGemma3: "dim",
    liger.LigerRMSNormForGemma4: "dim",
    liger.LigerFusedAddRMSNorm: "hidden_size",
    apex.FusedRMSNorm: "normalized_shape",
    apex.MixedFusedRMSNorm: "normalized_shape",
    transformer_engine.RMSNorm: "normalized_shape",
}
OURS = {"W": "weight", "epsilon": "eps"}  # as functional.py says it
TENSORS = {"x", "X", "input", "weight", "W", "residual", "R", "dy", "rstd"}
NUMBERS = {"eps", "epsilon"}
NO_TENSOR = {"list": [1.0] * 8, "array": torch.ones(8).numpy(), "str": "x", "number": 1.0}


def arguments(names):
    return [
        pytest.param(function, name, id=f"{function.__name__}-{name}")
        for function, given in FUNCTIONS.items()
        for name in given
        if name in names
    ]


def refused(error, name, function, given):
    with pytest.raises(error, match=rf"^{re.escape(OURS.get(name, name))}: expected .*, got "):
        function(**given)


@pytest.mark.parametrize("what", NO_TENSOR)
@pytest.mark.parametrize(("function", "name"), arguments(TENSORS))
def test_what_is_no_tensor(function, name, what):
    refused(TypeError, name, function, {**FUNCTIONS[function], name: NO_TENSOR[what]})


@pytest.mark.parametrize(("function", "name"), arguments(TENSORS))
def test_none_where_a_tensor_is_needed(function, name):
    needs_weight = function.__module__ in (apex.__name__, flashinfer.__name__)
    may_be_none = name in ("W", "residual") or (name == "weight" and not needs_weight)
    given = {**FUNCTIONS[function], name: None}
    if may_be_none or (name == "weight" and function is apex.fused_rms_norm):
        function(**given)
    else:
        refused(TypeError, name, function, given)


@pytest.mark.parametrize(("function", "name"), arguments(TENSORS))
def test_dtypes_and_shapes(function, name):
    given = FUNCTIONS[function]
    with pytest.raises(TypeError, match=": expected .*, got torch.int32"):
        function(**{**given, name: given[name].to(torch.int32)})
    if name not in ("x", "X", "input"):
        with pytest.raises(ValueError, match=": expected .*, got "):
            function(**{**given, name: given[name][..., :-1]})


@pytest.mark.parametrize("value", [torch.tensor(1e-6), "1e-6", True, [1e-6]], ids=str)
@pytest.mark.parametrize(("function", "name"), arguments(NUMBERS))
def test_numbers(function, name, value):
    refused(TypeError, name, function, {**FUNCTIONS[function], name: value})


@pytest.mark.parametrize("mode", [[], 3, True, 1.0, torch.tensor(0), None, "once"], ids=str)
def test_casting_modes(mode):
    """Liger's numbers of them are taken: True and 1.0 are none, though equal to one."""
    for function in (liger.liger_rms_norm, liger.liger_fused_add_rms_norm):
        refused(ValueError, "casting_mode", function, {**FUNCTIONS[function], "casting_mode": mode})
    for cls in (liger.LigerRMSNorm, liger.LigerFusedAddRMSNorm):
        refused(ValueError, "casting_mode", cls, {"hidden_size": 8, "casting_mode": mode})
        refused(ValueError, "init_fn", cls, {"hidden_size": 8, "init_fn": mode})


@pytest.mark.parametrize("mode", [[], 3, torch.tensor(0), "fast"], ids=str)
def test_modes_of_tilegym(mode):
    refused(ValueError, "mode", tilegym.rms_norm, {**FUNCTIONS[tilegym.rms_norm], "mode": mode})


@pytest.mark.parametrize("size", [8.0, "8", None, True, [8.0], torch.tensor(8), -1, (), (4, -8)], ids=str)
@pytest.mark.parametrize("cls", MODULES)
def test_sizes_of_a_module(cls, size):
    if cls is transformer_engine.RMSNorm and size is None:
        pytest.skip("asks for hidden_size in its place, in test_transformer_engine.py")
    error = ValueError if size in (-1, (), (4, -8)) else TypeError
    refused(error, MODULES[cls], cls, {MODULES[cls]: size})


@pytest.mark.parametrize("cls", MODULES)
def test_numbers_of_a_module(cls):
    """When it is made, not when it is first called."""
    numpy = pytest.importorskip("numpy")
    width = MODULES[cls]
    for eps in (torch.tensor(1e-6), "1e-6", True):
        refused(TypeError, "eps", cls, {width: 8, "eps": eps})
    refused(ValueError, "eps", cls, {width: 8, "eps": -1.0})
    if cls.__module__ in (liger.__name__, tilegym.__name__):
        refused(TypeError, "offset", cls, {width: 8, "offset": torch.tensor(1.0)})
    norm = cls(**{width: numpy.int64(8), "eps": numpy.float32(1e-5)})
    assert norm.weight.shape == (8,)
    norm = cls(**{width: 8})
    x = X.to(norm.weight.device)
    assert norm(x, *[x] * (cls is liger.LigerFusedAddRMSNorm)) is not None
    if cls is not liger.LigerFusedAddRMSNorm:
        with pytest.raises(TypeError, match=r"^(input|X): expected a torch.Tensor, got list$"):
            norm([1.0])


@pytest.mark.parametrize("name", ["dtype", "params_dtype", "zero_centered_gamma"])
@pytest.mark.parametrize("value", ["no", 3])
def test_transformer_engine(name, value):
    refused(TypeError, name, transformer_engine.RMSNorm, {"normalized_shape": 8, name: value})
    refused(TypeError, "hidden_size", transformer_engine.RMSNorm, {"hidden_size": 8.0})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_no_cast_hides_a_dtype(dtype, monkeypatch):
    """Adapters that cast x to their own dtype refuse what F.rms_norm refuses: apex under autocast too."""
    x = X.to(dtype)
    with pytest.raises(TypeError, match=": expected .*"):
        transformer_engine.RMSNorm(8, device="cpu")(x)
    assert dtype.is_floating_point or apex._cast(x, BF16) is x


@pytest.mark.parametrize("dtype", [torch.int32, "float32"])
def test_quack_module(dtype):
    refused(TypeError, "dtype", quack.QuackRMSNorm, {"dim": 8, "dtype": dtype})


def test_workspace():
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    numpy = pytest.importorskip("numpy")
    bytes_of = tilegym.rms_norm_backward_workspace_bytes
    for name in "MN":
        for value in (4.0, "4", None, True, torch.tensor(4)):
            refused(TypeError, name, bytes_of, {"M": 4, "N": 8, name: value})
        refused(ValueError, name, bytes_of, {"M": 4, "N": 8, name: -1})
    refused(ValueError, "N", bytes_of, {"M": 4, "N": 0})
    for dtype in (torch.float64, torch.int32, "bfloat16"):
        refused(TypeError, "dtype", bytes_of, {"M": 4, "N": 8, "dtype": dtype})
    for device in ("nope", 1.5, "meta"):
        refused(ValueError, "device", bytes_of, {"M": 4, "N": 8, "device": device})
    expected = bytes_of(1040, 8, device=torch.device("cpu"))
    assert expected > 0 and expected == bytes_of(numpy.int64(1040), numpy.int32(8), dtype=BF16, device="cpu")
    if torch.cuda.is_available():
        assert bytes_of(1040, 8) == bytes_of(1040, 8, device="cuda") == bytes_of(1040, 8, device="cuda:0")


@pytest.mark.parametrize("name", [None, [], 3], ids=str)
def test_names_of_registrations(name):
    """Whether or not the library is installed."""
    refused(TypeError, "backend", tilegym.register, {"backend": name})
    refused(TypeError, "provider", vllm.register, {"provider": name})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_stands_for_a_tensor_is_taken(function):
    """torch.fx traces proxies."""
    if function not in (tilegym.rms_norm, quack.rmsnorm, vllm.rms_norm, apex.fused_rms_norm) and not (
        function.__module__ == liger.__name__ or function is apex.fused_rms_norm_affine
    ):
        pytest.skip("it reads dtypes or values")
    (first, _), *others = FUNCTIONS[function].items()

    def call(x):
        return function(**{first: x}, **dict(others))

    torch.testing.assert_close(torch.fx.symbolic_trace(call)(X), call(X))
