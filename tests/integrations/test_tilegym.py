# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""TileGym's names: arithmetic against float64, its registry, and what it does to ct.launch."""

import sys
from types import ModuleType

import pytest
import torch
from helpers import BF16, DEVICE, FP32, assert_within, expected_results, make_inputs

import tilegym_rmsnorm
from tilegym_rmsnorm.integrations import tilegym as ours


@pytest.mark.parametrize("backward", [ours.rms_norm_backward, ours.rms_norm_backward_torch])
def test_backwards_by_themselves(backward):
    inputs = make_inputs(37, 96, BF16, BF16)
    rstd = ours.compute_rms_norm_rstd_torch(inputs.x, inputs.eps)
    dx, dw = backward(inputs.x.view(1, 37, 96), inputs.dy.view(1, 37, 96), inputs.weight, rstd)
    assert_within(expected_results(inputs), rstd=rstd, dx=dx[0], dw=dw)


def test_what_tilegym_refuses_or_crashes_at():
    x = torch.randn(3, 8, device=DEVICE)
    bias = torch.randn(8, device=DEVICE)
    plain = ours.rms_norm(x, (8,), None, 1e-6)
    assert torch.equal(
        ours.rms_norm(x, 8, None, 1e-6, bias), tilegym_rmsnorm.rms_norm(x, 8, None, 1e-6, bias=bias)
    )
    assert torch.equal(plain, tilegym_rmsnorm.rms_norm(x, 8, None, 1e-6))
    assert ours.rms_norm(x[:0], None, bias, 1e-6).shape == (0, 8)


@pytest.mark.parametrize(
    ("model", "weight", "offset"), [("llama", 1.0, 0.0), ("gemma3", 0.0, 1.0), ("qwen2", 1.0, 0.0)]
)
def test_modules(model, weight, offset):
    norm = ours.get_rms_norm_module(model)(16)
    assert norm.offset == offset and norm.variance_epsilon == 1e-6 and norm.hidden_size == 16
    assert list(norm.state_dict()) == ["weight"] and torch.equal(norm.weight, torch.full((16,), weight))
    x = torch.randn(2, 3, 16, dtype=BF16)
    expected = tilegym_rmsnorm.rms_norm(x, 16, norm.weight, 1e-6, offset=offset)
    for y in (norm(x), norm(x, mode="multi_wave_cached"), norm.forward_torch(x)):
        assert torch.equal(y, expected) and y.dtype == BF16
    norm(x).sum().backward()
    assert norm.weight.grad.abs().sum() > 0  # TileGym's raises with an offset
    assert "offset=" in repr(norm) and type(norm).rms_norm_backward is ours.rms_norm_backward


# The workspace


def allocated_in_a_backward(m, n, dtype, monkeypatch):
    """Bytes that the launcher asks for, but for dx and dw."""
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    asked = []
    empty = machine.InterpretedMachine.empty

    def counted(self, shape, dtype):
        asked.append(torch.Size(shape).numel() * dtype.itemsize)
        return empty(self, shape, dtype)

    x, dy, weight = torch.ones(m, n, dtype=dtype), torch.ones(m, n, dtype=dtype), torch.ones(n, dtype=dtype)
    rstd = torch.ones(m)
    monkeypatch.setattr(machine.InterpretedMachine, "empty", counted)
    tilegym_rmsnorm.rms_norm_backward(x, dy, weight, rstd, backend="cutile")
    return sum(asked) - (m * n + n) * dtype.itemsize


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter's machine allocates")
@pytest.mark.parametrize(("m", "n"), [(1, 16), (40, 16), (1040, 8), (3, 40000)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_workspace_is_twice_what_is_allocated(m, n, dtype, monkeypatch):
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    told = ours.rms_norm_backward_workspace_bytes(m, n, dtype=dtype)
    assert told == 2 * allocated_in_a_backward(m, n, dtype, monkeypatch)


def test_workspace_of_rows_that_one_launch_cannot_take_and_of_none():
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    bytes_of = ours.rms_norm_backward_workspace_bytes
    assert bytes_of(0, 8) == 0 < bytes_of(1040, 8) < bytes_of(2**33, 8)


# The registry


@pytest.fixture
def dispatcher(monkeypatch):
    """Fake tilegym.backend.dispatcher: a registry, and a decorator that puts a function into it."""
    module = ModuleType(ours.REGISTRY)
    module._REGISTRY = {
        name: {"cutile": lambda name=name: f"TileGym's {name}", "default": print} for name in ours.OPS
    }

    def register_impl(name, backend):
        def decorator(function):
            module._REGISTRY.setdefault(name, {})[backend] = function
            return function

        return decorator

    module.register_impl = register_impl
    for name in ("tilegym", "tilegym.backend"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, ours.REGISTRY, module)
    return module


def registered(dispatcher, backend="cutile"):
    return {name: of_op.get(backend) for name, of_op in dispatcher._REGISTRY.items()}


def test_register_and_undo(dispatcher):
    before = {name: dict(of_op) for name, of_op in dispatcher._REGISTRY.items()}
    with ours.register() as registration:
        assert registered(dispatcher) == ours.OPS
        assert dispatcher._REGISTRY["rms_norm"]["default"] is print
    assert dispatcher._REGISTRY == before
    registration.undo()
    assert dispatcher._REGISTRY == before
    with pytest.raises(RuntimeError, match="this registration was undone; call register"), registration:
        pass


def test_a_backend_that_had_none_has_none_again(dispatcher):
    registration = ours.register("triton")
    assert registered(dispatcher, "triton") == ours.OPS
    registration.undo()
    assert registered(dispatcher, "triton") == {"rms_norm": None, "get_rms_norm_module": None}
    assert "triton" not in dispatcher._REGISTRY["rms_norm"]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_registrations_may_end_in_any_order(dispatcher, first_ends_first):
    before = registered(dispatcher)
    one, other = ours.register(), ours.register()
    (one if first_ends_first else other).undo()
    assert registered(dispatcher) == ours.OPS
    (other if first_ends_first else one).undo()
    assert registered(dispatcher) == before


def test_what_another_library_registers_meanwhile_stays(dispatcher):
    before = registered(dispatcher)
    with ours.register():
        dispatcher.register_impl("rms_norm", "cutile")(len)
    assert registered(dispatcher) == {**before, "rms_norm": len}
    with ours.register():
        dispatcher.register_impl("rms_norm", "cutile")(len)
        with ours.register():
            assert registered(dispatcher) == ours.OPS
    assert registered(dispatcher)["rms_norm"] is len


def test_register_without_tilegym(monkeypatch):
    for name in ("tilegym", "tilegym.backend", ours.REGISTRY):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tilegym", None)
    with pytest.raises(ImportError, match="register needs TileGym, which is not installed"):
        ours.register()


def test_register_beside_a_release_without_that_registry(dispatcher):
    del dispatcher._REGISTRY
    with pytest.raises(RuntimeError, match="register knows the registry of TileGym 1.5.1"):
        ours.register()
