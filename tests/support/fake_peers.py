# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Modules with the names and signatures of other libraries' RMSNorm, which compute the reference.

The signatures are those of the versions that pyproject.toml's extra `peers` pins; the real libraries need a GPU.
"""

import dataclasses
import types

import torch

import tilegym_rmsnorm as tr
from bench.providers import peers


class Torch(torch.autograd.Function):
    """The reference with autograd; the libraries' own autograd functions take more arguments behind these."""

    @staticmethod
    def forward(ctx, x, weight, eps, *others):
        y, rstd = tr.rms_norm_forward(x, weight, eps, backend="torch")
        ctx.save_for_backward(x, weight, rstd)
        ctx.others = len(others)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        dx, dw = tr.rms_norm_backward_torch(x, dy, weight, rstd)
        return dx, dw, None, *[None] * ctx.others


def forward(x, weight, eps):
    return tr.rms_norm_forward(x, weight, eps, backend="torch")


def add_forward(x, weight, bias, residual, eps):
    """Compute y, the rounded sum and rstd as quack does: the sum is normalized before it is rounded."""
    total = x.float() if residual is None else x.float() + residual.float()
    y, rstd = forward(total, weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype), total.to(x.dtype), rstd


def add_backward(x, weight, dy, rstd, d_residual_out):
    """dx, with the other gradient added before it is rounded, and dw."""
    dx, dw = tr.rms_norm_backward_torch(x.float(), dy.float(), weight.float(), rstd)
    dx = dx if d_residual_out is None else dx + d_residual_out.float()
    return dx.to(x.dtype), dw.to(weight.dtype)


@dataclasses.dataclass(frozen=True)
class FwdConfig:
    num_threads: int = 128
    threads_per_row: int = 32
    cluster_n: int = 1
    reload_from: str | None = None
    delay_w_load: bool = False

    @classmethod
    def from_analytical_heuristic(cls, N, dtype_width, arch_major=None, is_layernorm=False):
        return cls()


@dataclasses.dataclass(frozen=True)
class BwdConfig:
    num_threads: int = 256
    threads_per_row: int = 256
    cluster_n: int = 2
    reload_wdy: str | None = "smem"
    reload_x: str | None = None
    use_tma: bool = False
    smem_stages: int = 2

    @classmethod
    def from_analytical_heuristic(cls, N, dtype_width, dout_width, arch_major=None, T_hint=0, num_acc=1):
        return cls()


def fake_quack() -> dict[str, types.ModuleType]:
    def rmsnorm_fwd(
        x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, store_rstd=False,
        weight_offset=0.0,
    ):  # fmt: skip
        y, total, rstd = add_forward(x, weight, bias, residual, eps)
        return y, total, rstd if store_rstd else None

    def rmsnorm_bwd(
        x, weight, dout, rstd, dresidual_out=None, has_bias=False, has_residual=False, weight_offset=0.0
    ):
        assert has_residual == (dresidual_out is not None)
        dx, dw = add_backward(x, weight, dout, rstd, dresidual_out)
        db = dout.float().sum(0).to(weight.dtype) if has_bias else None
        return dx, dw, db, dx if has_residual else None

    def fwd_tuned(
        x, weight, out, bias=None, rstd=None, mean=None, residual=None, residual_out=None, eps=1e-6,
        is_layernorm=False, per_head=False, weight_offset=0.0, config=None,
    ):  # fmt: skip
        assert isinstance(config, FwdConfig)
        y, total, r = add_forward(x, weight, bias, residual, eps)
        out.copy_(y)
        rstd.copy_(r)
        assert (residual is None) == (residual_out is None)
        if residual is not None:
            residual_out.copy_(total)

    def bwd_tuned(
        x, weight, dout, rstd, dx, dw_partial=None, db_partial=None, dresidual_out=None, dresidual=None,
        sm_count=None, per_head=False, has_dw_partial=False, has_db_partial=False, mean=None, is_layernorm=False,
        weight_offset=0.0, config=None,
    ):  # fmt: skip
        assert isinstance(config, BwdConfig) and (sm_count or has_dw_partial)
        dx.copy_(add_backward(x, weight, dout, rstd, dresidual_out)[0])
        terms = {"dw": dout.float() * x.float() * rstd.unsqueeze(1), "db": dout.float()}
        has, partials = {"dw": has_dw_partial, "db": has_db_partial}, {"dw": dw_partial, "db": db_partial}
        for name, partial in partials.items():
            assert has[name] == (partial is not None)
            if partial is not None:
                assert partial.dtype == torch.float32
                partial.zero_()
                partial[-1] = terms[name].sum(0)

    def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6):
        return Torch.apply(x, weight, eps)

    tuned = {"rmsnorm_fwd_tuned": fwd_tuned, "rmsnorm_bwd_tuned": bwd_tuned}
    tuned = {name: types.SimpleNamespace(fn=function) for name, function in tuned.items()}
    functions = {"rmsnorm_fwd": rmsnorm_fwd, "rmsnorm_bwd": rmsnorm_bwd, "rmsnorm": rmsnorm} | tuned
    configs = {"RmsNormFwdConfig": FwdConfig, "RmsNormBwdConfig": BwdConfig}
    configs["get_sm_count"] = lambda N, device: 12
    return {
        "quack": module("quack", rmsnorm=rmsnorm),  # the package's attribute of this name is the function
        "quack.rmsnorm": module("quack.rmsnorm", **functions),
        "quack.rmsnorm_config": module("quack.rmsnorm_config", **configs),
    }


def fake_liger_triton() -> dict[str, types.ModuleType]:
    def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
        return *with_x(forward(X, W, eps), X), 64, 4, casting_mode

    def rms_norm_backward(
        dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode, needs_dw=None
    ):
        assert (casting_mode, BLOCK_SIZE, num_warps, in_place) == (peers.GEMMA, 64, 4, True)
        dx, dw = tr.rms_norm_backward_torch(X, dY, W, RSTD)
        return dY.copy_(dx), dw if needs_dw in (None, True) else None

    def fused_forward(X, R, W, eps, offset, casting_mode):
        return *rounded_add_forward(X, R, W, eps), 64, 4, 2, casting_mode

    def fused_backward(
        dY,
        dS_out,
        S,
        W,
        RSTD,
        offset,
        casting_mode,
        BLOCK_SIZE,
        num_warps,
        num_stages,
        in_place,
        needs_dw=None,
    ):
        assert (casting_mode, BLOCK_SIZE, num_warps, in_place) == (peers.GEMMA, 64, 4, False)
        dx, dw = add_backward(S, W, dY, RSTD, dS_out)
        return dx, dx, dw

    return modules_of(
        "liger_kernel.ops.fused_add_rms_norm",
        fused_add_rms_norm_forward=fused_forward,
        fused_add_rms_norm_backward=fused_backward,
    ) | modules_of(
        "liger_kernel.ops.rms_norm",
        calculate_settings=lambda n: (64, 4),
        rms_norm_forward=rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        LigerRMSNormFunction=Torch,
    )


def rounded_add_forward(x, residual, weight, eps):
    """y, the sum and rstd as Liger makes them."""
    total = x + residual
    y, rstd = forward(total, weight, eps)
    return y, total, rstd


def fake_liger_cutile() -> dict[str, types.ModuleType]:
    def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
        return *with_x(forward(X, W, eps), X), 64, None, casting_mode

    def rms_norm_backward(dY, X, W, RSTD, offset, casting_mode, BLOCK_SIZE, num_warps, in_place, row_mode):
        assert (
            BLOCK_SIZE == 64
            and not in_place
            and tiles["liger_kernel.ops.cutile.ops.rms_norm"]._DW_REDUCTION_POLICY
        )
        return tr.rms_norm_backward_torch(X, dY, W, RSTD)

    def registered_forward(X, W, eps, offset, casting_mode, mode):
        assert mode in ("standard", "static_persistent", "multi_wave_cached")
        return *with_x(forward(X, W, eps), X), 64, casting_mode, mode

    def registered_backward(dY, X, W, RSTD, offset, casting_mode, TILE_SIZE, in_place):
        assert (casting_mode, TILE_SIZE, in_place) == (peers.GEMMA, 64, False)
        return tr.rms_norm_backward_torch(X, dY, W, RSTD)

    tiles = modules_of(
        "liger_kernel.ops.cutile.ops.rms_norm",
        rms_norm_forward=rms_norm_forward,
        rms_norm_backward=rms_norm_backward,
        LigerRMSNormFunction=Torch,
    )

    def fused_forward(X, R, W, eps, offset, casting_mode):
        return *rounded_add_forward(X, R, W, eps), 64, casting_mode

    def fused_backward(dY, dS_out, S, W, RSTD, offset, casting_mode, BLOCK_SIZE):
        assert (casting_mode, BLOCK_SIZE) == (peers.GEMMA, 64)
        dx, dw = add_backward(S, W, dY, RSTD, dS_out)
        return dx, dx, dw

    tiles |= modules_of(
        "liger_kernel.ops.cutile.ops.fused_add_rms_norm",
        calculate_settings=lambda n: 64,
        _fused_add_rms_norm_forward_ct=fused_forward,
        _fused_add_rms_norm_backward_ct=fused_backward,
    )
    return tiles | modules_of(
        "liger_kernel.ops.backends._cutile.rms_norm",
        _rms_norm_forward=registered_forward,
        _rms_norm_backward=registered_backward,
    )


def fake_liger_cute() -> dict[str, types.ModuleType]:
    def cute_forward(x, weight, eps, offset, casting_mode):
        y, rstd = forward(x, weight, eps)
        return y, x, weight, rstd

    def cute_backward(dy, x_flat, w_kernel, rstd, in_place, casting_mode, ds=None, weight_offset=0.0):
        dx, dw = tr.rms_norm_backward_torch(x_flat, dy, w_kernel, rstd)
        return dx, dw.float()  # its autograd function casts

    def fused_forward(X, R, W, eps, offset, casting_mode):
        y, total, rstd = add_forward(X, W, None, R, eps)
        return y, total, W, rstd

    def fused_backward(dY, dS_out, S, W_kernel, RSTD, in_place, casting_mode, weight_offset=0.0):
        assert not in_place
        dx, dw = add_backward(S, W_kernel, dY, RSTD, dS_out)
        return dx, dx, dw.float()

    return modules_of(
        "liger_kernel.ops.backends._cutedsl.fused_add_rms_norm",
        _fused_add_rms_norm_cutedsl_forward=fused_forward,
        _fused_add_rms_norm_cutedsl_backward=fused_backward,
    ) | modules_of(
        "liger_kernel.ops.backends._cutedsl.rms_norm",
        _rms_norm_cutedsl_forward=cute_forward,
        _rms_norm_cutedsl_backward=cute_backward,
        _LigerRMSNormCuTeDSLFunction=Torch,
    )


def fake_tilegym() -> dict[str, types.ModuleType]:
    class RMSNorm:
        @staticmethod
        def forward(ctx, x, normalized_shape, weight, eps, bias=None, mode=None, offset=0.0):
            assert mode in (None, "static_persistent", "multi_wave_reload", "multi_wave_cached")
            y, rstd = forward(x, weight, eps)
            ctx.save_for_backward(x, weight, rstd)
            ctx.eps = eps
            return y

    def rms_norm(input, normalized_shape, weight, eps, bias=None, mode=None, offset=0.0, **kwargs):
        return Torch.apply(input, weight, eps)

    def rms_norm_backward(x, dy, weight, rstd):
        return tr.rms_norm_backward_torch(x, dy, weight, rstd)

    return modules_of(
        "tilegym.ops.cutile.rms_norm",
        _RMSNorm=RMSNorm,
        rms_norm=rms_norm,
        rms_norm_backward=rms_norm_backward,
    )


def fake_torch_quack() -> dict[str, types.ModuleType]:
    def quack_rmsnorm_fwd(input, weight, normalized_shape, eps):
        y, rstd = forward(input, weight, eps)
        return y, rstd.unsqueeze(1)

    def quack_rmsnorm_bwd(grad_out, input, rstd, weight, normalized_shape, dw_mask=True):
        assert rstd.shape == (input.shape[0], 1) and dw_mask
        return tr.rms_norm_backward_torch(input, grad_out, weight, rstd.squeeze(1))

    name = "torch._native.ops.norm.norms"
    return {name: module(name, quack_rmsnorm_fwd=quack_rmsnorm_fwd, quack_rmsnorm_bwd=quack_rmsnorm_bwd)}


FAKES = {
    "quack": fake_quack,
    "liger.cutile": fake_liger_cutile,
    "liger.cute": fake_liger_cute,
    "liger.triton": fake_liger_triton,
    "tilegym": fake_tilegym,
    "torch.quack": fake_torch_quack,
}


def module(name: str, **attributes: object) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(attributes)
    return made


def modules_of(name: str, **attributes: object) -> dict[str, types.ModuleType]:
    """A module and the packages above it."""
    parts = name.split(".")
    packages = {".".join(parts[:end]): module(".".join(parts[:end])) for end in range(1, len(parts))}
    return packages | {name: module(name, **attributes)}


def with_x(outputs, x):
    """y, x, rstd: how Liger returns them."""
    y, rstd = outputs
    return y, x, rstd
