# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""RMSNorm in cuTile in one file, in the layout of a TileGym op: a forward kernel, and two kernels for the backward.

    python examples/two_kernels.py      on a GPU; without one on the CPU, in the interpreter of tilegym_rmsnorm

It prints the errors of y, dx and dw against float64. For row i of x (M x N), in float32, with xhat = x * rstd:

    rstd_i = 1 / sqrt(mean_j(x_ij^2) + eps)              y = xhat * weight
    g = dy * weight      c_i = mean_j(xhat * g)          dx = (g - xhat * c) * rstd
    dw_j = sum_i(dy_ij * xhat_ij)

dx needs one row, dw all of them. So P blocks walk the rows: each writes dx, sums its dy * xhat in registers, and writes
that sum once, as its row of dw_partial (P x N, float32). A second kernel adds these rows in a fixed order. It costs
most where rows are few: docs/one-launch-or-two.md. Atomic adds would save dw_partial, 1 % of the traffic at M = 16384,
P = 132, bfloat16. But bits of dw would change from run to run, and one launch would still be needed, to set dw to 0."""

import functools

import cuda.tile as ct
import torch

IMPLEMENTATIONS: dict = {}  # (op, backend): function. In TileGym: from tilegym.backend import dispatch, register_impl


def register_impl(name, backend):
    def register(function):
        IMPLEMENTATIONS[name, backend] = function
        return function

    return register


def dispatch(name):
    def call(stub, *args, backend="cutile", **kwargs):
        return IMPLEMENTATIONS.get((name, backend), stub)(*args, **kwargs)

    return lambda stub: functools.wraps(stub)(functools.partial(call, stub))


@dispatch("rms_norm")  # in TileGym this stub is in ops/ops.py, and all below it in ops/cutile
def rms_norm(input, normalized_shape, weight, eps, bias=None, mode=None, **kwargs):
    """input * rstd * weight over the last dimension, in input's dtype; differentiable once."""
    raise NotImplementedError("rms_norm: expected a backend that registered it, as cutile did")


def load_float32(array, index, shape):
    """A tile, named t and its array, as tx; index counts tiles. Past the end are 0s, which add nothing to sums."""
    return ct.astype(ct.load(array, index, shape, padding_mode=ct.PaddingMode.ZERO), ct.float32)


@ct.kernel(occupancy=2)  # else one block takes all registers of Hopper's SM, and no load overlaps its sum
def rms_norm_forward(y, rstd, x, weight, eps, ROWS: ct.Constant, WIDTH: ct.Constant):
    """Grid: (cdiv(M, ROWS),). A block has ROWS rows, each whole: WIDTH >= N."""
    tx = load_float32(x, (ct.bid(0), 0), (ROWS, WIDTH))
    tweight = load_float32(weight, (0,), (WIDTH,))
    trstd = ct.rsqrt(ct.sum(tx * tx, axis=1, keepdims=True) / x.shape[1] + eps)
    ct.store(rstd, (ct.bid(0),), ct.reshape(trstd, (ROWS,)))
    ct.store(y, (ct.bid(0), 0), ct.astype(tx * trstd * tweight, y.dtype))


@ct.kernel(num_worker_warps=8)  # the registers of 4 warps do not hold wide rows; those of 8 do up to N = 8192
def rms_norm_backward_dx(dx, dw_partial, dy, x, weight, rstd, ROWS: ct.Constant, WIDTH: ct.Constant):
    """Grid: (P,). Block b has tiles b, b + P, b + 2P, ... of the rows, and writes row b of dw_partial."""
    tweight = load_float32(weight, (0,), (WIDTH,))
    tdw = ct.zeros((ROWS, WIDTH), dtype=ct.float32)
    for i in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        tdy = load_float32(dy, (i, 0), (ROWS, WIDTH))
        trstd = ct.reshape(load_float32(rstd, (i,), (ROWS,)), (ROWS, 1))
        txhat = load_float32(x, (i, 0), (ROWS, WIDTH)) * trstd

        tg = tdy * tweight
        tc = ct.sum(txhat * tg, axis=1, keepdims=True) / x.shape[1]
        tdw = tdw + tdy * txhat
        ct.store(dx, (i, 0), ct.astype((tg - txhat * tc) * trstd, dx.dtype))

    ct.store(dw_partial, (ct.bid(0), 0), ct.sum(tdw, axis=0, keepdims=True))


@ct.kernel
def rms_norm_backward_dw(dw, dw_partial, ROWS: ct.Constant, WIDTH: ct.Constant):
    """Grid: (cdiv(N, WIDTH),). A block adds the rows of dw_partial in WIDTH columns, ROWS at a time."""
    tdw = ct.zeros((ROWS, WIDTH), dtype=ct.float32)
    for i in range(ct.cdiv(dw_partial.shape[0], ROWS)):
        tdw = tdw + load_float32(dw_partial, (i, ct.bid(0)), (ROWS, WIDTH))
    ct.store(dw, (ct.bid(0),), ct.astype(ct.sum(tdw, axis=0), dw.dtype))


def launch(kernel, blocks, *args):
    if args[0].is_cuda:
        with torch.cuda.device(args[0].device):
            return ct.launch(torch.cuda.current_stream(), (blocks,), kernel, args)
    from tilegym_rmsnorm.backends.cutile import interpreter

    return torch.compiler.disable(interpreter.launch)(kernel._pyfunc, (blocks,), args)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        WIDTH = 1 << (len(weight) - 1).bit_length()  # extents of tiles are powers of two
        ctx.tile = max(1, min(64, 4096 // WIDTH)), WIDTH
        y, rstd = torch.empty_like(x), x.new_empty(len(x), dtype=torch.float32)
        launch(rms_norm_forward, ct.cdiv(len(x), ctx.tile[0]), y, rstd, x, weight, eps, *ctx.tile)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():  # for create_graph=True: dx would pass for a constant
            raise NotImplementedError("rms_norm: expected to be differentiated once, got create_graph=True")
        x, weight, rstd = ctx.saved_tensors
        sm_count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
        P, N = min(sm_count, ct.cdiv(len(x), ctx.tile[0])), len(weight)
        dx, dw, dw_partial = torch.empty_like(x), torch.empty_like(weight), rstd.new_empty(P, N)
        launch(rms_norm_backward_dx, P, dx, dw_partial, dy.contiguous(), x, weight, rstd, *ctx.tile)
        launch(rms_norm_backward_dw, ct.cdiv(N, 32), dw, dw_partial, 64, 32)
        return dx, dw, None


@register_impl("rms_norm", backend="cutile")  # mode, TileGym's choice of a kernel, changes nothing here
def rms_norm_cutile(input, normalized_shape, weight, eps, bias=None, mode=None, offset=0.0):
    got = [t.dtype if type(t) in (torch.Tensor, torch.nn.Parameter) else type(t) for t in (input, weight)]
    if not {*got} <= {torch.float16, torch.bfloat16, torch.float32}:
        raise TypeError(f"input, weight: expected tensors of float16, bfloat16 or float32, got {got}")
    N, got = weight.numel(), (tuple(input.shape), normalized_shape, tuple(weight.shape))
    if not (got[0][-1:] == got[2] == (N,) and got[1] in (None, N, (N,), [N]) and N <= 8192 and input.numel()):
        raise ValueError(f"input, normalized_shape, weight: expected (*, N <= 8192), (N,), (N,), got {got}")
    if weight.device != input.device or input.device.type not in ("cuda", "cpu"):
        raise ValueError(f"weight: expected CUDA or CPU, as input on {input.device}, got {weight.device}")
    if not isinstance(eps, (float, int)) or bias is not None or offset != 0:
        raise TypeError(f"eps, bias, offset: expected a float, None, 0, got {eps, bias, offset}")
    return RMSNorm.apply(input.reshape(-1, N).contiguous(), weight.contiguous(), float(eps)).view(input.shape)


def results(norm, *tensors):
    x, weight, dy = (tensor.detach().requires_grad_() for tensor in tensors)
    return (y := norm(x, x.shape[1:], weight, 1e-6)), *torch.autograd.grad(y, (x, weight), dy)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for M, N, dtype in ((7, 77, torch.float32), (2000, 300, torch.bfloat16), (64, 4096, torch.float16)):
        tensors = [torch.randn(shape, device=device).to(dtype) for shape in ((M, N), (N,), (M, N))]
        exact = results(torch.nn.functional.rms_norm, *(tensor.double() for tensor in tensors))
        first, second = results(rms_norm, *tensors), results(rms_norm, *tensors)
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(first, exact, strict=True)]
        print(f"{M} x {N}, {dtype}: errors of y, dx, dw:", *(f"{error:.1e}" for error in errors))
        assert all(error <= torch.finfo(dtype).eps / 2 + 1e-6 for error in errors), "more than one rounding"
        assert all(map(torch.equal, first, second)), "two runs have different bits"
