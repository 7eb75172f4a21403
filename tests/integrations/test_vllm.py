# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A provider of vLLM's op: against what the op means, with a stand-in of vLLM's contract, and with vLLM where it is."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32
from peer_signatures import signature

from tilegym_rmsnorm.integrations import vllm as ours


def native(x, weight, epsilon, variance_size=None):
    """Compute the op by the text of vLLM 0.33, in our words."""
    wide = x.float()
    of_mean = wide if variance_size is None else wide[..., :variance_size]
    y = wide * torch.rsqrt(of_mean.square().mean(-1, keepdim=True) + epsilon)
    return (y if weight is None else y.to(weight.dtype) * weight).to(x.dtype)


class Op:
    """Stand-in for vllm.ir.op.IrOp: its checks when a provider is registered, and how it calls one."""

    def __init__(self):
        self.schema = torch.library.infer_schema(_typed_native, mutates_args=[])
        self.impls = {"native": SimpleNamespace(impl_fn=native, supported=True)}

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        def decorator(function):
            assert provider not in self.impls, "already registered"
            assert torch.library.infer_schema(function, mutates_args=[]) == self.schema
            assert signature(supports_args) == signature(ours.rms_norm) and not inplace
            record = SimpleNamespace(impl_fn=function, supported=supported, supports_args=supports_args)
            self.impls[provider] = record
            return record

        return decorator

    def __call__(self, *args):
        record = self.impls["tilegym_rmsnorm"]
        return (record if record.supports_args(*args) else self.impls["native"]).impl_fn(*args)


def _typed_native(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return native(x, weight, epsilon, variance_size)


@pytest.fixture
def op(monkeypatch):
    module = ModuleType(ours.OPS)
    module.rms_norm = Op()
    for name in ("vllm", "vllm.ir"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, ours.OPS, module)
    return module.rms_norm


CASES = [
    (BF16, BF16, True),
    (FP16, FP16, True),
    (FP32, FP32, True),
    (BF16, FP32, True),
    (BF16, None, True),
    (FP32, BF16, False),
    (BF16, FP16, False),
]


@pytest.mark.parametrize(("dtype", "weight_dtype", "is_supported"), CASES)
def test_it_has_the_roundings_of_the_native_code(op, dtype, weight_dtype, is_supported):
    """Bit by bit but for rows whose rstd has another last bit; what has others is left to the native code."""
    ours.register()
    torch.manual_seed(0)
    x = torch.randn(4, 16, 256, device=DEVICE).to(dtype)
    weight = None if weight_dtype is None else torch.randn(256, device=DEVICE).to(weight_dtype)
    assert ours.supports_args(x, weight, 1e-5) is is_supported
    y, expected = op(x, weight, 1e-5), native(x, weight, 1e-5)
    assert y.dtype == expected.dtype and y.is_contiguous()
    if dtype == FP32:
        torch.testing.assert_close(y, expected)
    else:
        assert (y == expected).float().mean() > 0.99


def test_the_mean_of_a_part_is_left_to_the_native_code(op):
    ours.register()
    x, weight = torch.randn(3, 8), torch.randn(8)
    assert ours.supports_args(x, weight, 1e-5, 4) is False
    assert torch.equal(op(x, weight, 1e-5, 4), native(x, weight, 1e-5, 4))
    with pytest.raises(ValueError, match="variance_size: expected None, got 4"):
        ours.rms_norm(x, weight, 1e-5, 4)


def test_registered_twice_is_registered_once(op):
    record = ours.register()
    assert ours.register() is record and list(op.impls) == ["native", "tilegym_rmsnorm"]
    assert ours.register("another").impl_fn is ours.rms_norm


@pytest.mark.parametrize("usable", [True, False])
def test_supported_where_a_kernel_can_run(op, usable, monkeypatch):
    monkeypatch.setattr(
        ours.registry, "why_unusable", lambda backend, request: None if usable and backend == "triton" else 1
    )
    assert ours.register().supported is usable


def test_tracers_see_an_op(op):
    """vLLM lowers its op by tracing what a provider does."""
    from torch.fx.experimental.proxy_tensor import make_fx

    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    with torch.no_grad():
        graph = make_fx(lambda x, weight: ours.rms_norm(x, weight, 1e-5))(x, weight)
    targets = [str(node.target) for node in graph.graph.nodes]
    assert "tilegym_rmsnorm.rms_norm_forward.default" in targets
    torch.testing.assert_close(graph(x, weight), native(x, weight, 1e-5))


@pytest.mark.parametrize("missing", ["vllm", "rms_norm"])
def test_without_vllm(op, monkeypatch, missing):
    if missing == "rms_norm":
        del sys.modules[ours.OPS].rms_norm
    else:
        monkeypatch.delitem(sys.modules, ours.OPS)
        monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="register needs vLLM with vllm.ir.ops.rms_norm"):
        ours.register()


def test_with_the_installed_vllm():
    op = pytest.importorskip(ours.OPS, exc_type=ImportError).rms_norm
    record = ours.register("tilegym_rmsnorm_test")
    try:
        assert op.impls["tilegym_rmsnorm_test"] is record
        args = op.generate_inputs(num_tokens=8, hidden_size=64, dtype=BF16, device=DEVICE)
        tolerance = op.get_tolerance(BF16)
        torch.testing.assert_close(record.impl_fn(*args), op.impls["native"].impl_fn(*args), **tolerance)
        assert record.supports_args(*args) is True
        with op.set_priority(["tilegym_rmsnorm_test", "native"]):
            chosen = op.dispatch(*args).provider
            torch.testing.assert_close(op(*args), op.impls["native"].impl_fn(*args), **tolerance)
        assert chosen == ("tilegym_rmsnorm_test" if record.supported else "native")
    finally:
        del op.impls["tilegym_rmsnorm_test"]
