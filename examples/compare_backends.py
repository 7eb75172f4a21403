# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compares every backend that works here with float64: the largest error of y, dx and dw, and on a GPU the time.

    python examples/compare_backends.py
    python examples/compare_backends.py --rows 16384 --columns 8192 --dtype float32

It prints a line for each backend; of one that cannot run here, why. Errors are relative to the largest value of the
result. Without a GPU the kernels of cutile and triton run in interpreters; times of these, and of busy cores, would say
nothing. For figures to rely on, run bench/run.sh.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from tilegym_rmsnorm import get_registry_info, rms_norm

HAS_GPU = torch.cuda.is_available()
EPS = 1e-6


def error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=8192 if HAS_GPU else 32)
    parser.add_argument("--columns", type=int, default=4096 if HAS_GPU else 128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    if not HAS_GPU:  # before the package is asked which backends work
        os.environ.update(TILEGYM_RMSNORM_INTERPRET="1", TRITON_INTERPRET="1")
    shape, dtype = (options.rows, options.columns), getattr(torch, options.dtype)
    device = "cuda" if HAS_GPU else "cpu"

    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    weight = (torch.rand(shape[1], device=device) + 0.5).to(dtype).requires_grad_()
    dy = torch.randn(shape, device=device).to(dtype)

    def results(backend: str) -> tuple[Tensor, ...]:
        y = rms_norm(x, shape[1:], weight, EPS, backend=backend)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    y64 = F.rms_norm(wide[0], shape[1:], wide[1], EPS)
    expected = (y64, *torch.autograd.grad(y64, wide, dy.double()))

    print(f"{options.rows} x {options.columns}, {options.dtype}, {device}")
    print("backend   error of y       of dx       of dw" + "   forward + backward" * HAS_GPU)
    for backend, found in get_registry_info()["backends"].items():
        if not found["usable"]:
            print(f"{backend:8} not usable: {found['reason']}")
            continue
        errors = [error(*pair) for pair in zip(results(backend), expected, strict=True)]
        time = ""
        if HAS_GPU:
            timer = Timer("results(backend)", globals={"results": results, "backend": backend})
            time = f"   {timer.blocked_autorange(min_run_time=0.2).median * 1e6:15.0f} us"
        print(f"{backend:8} {errors[0]:11.1e} {errors[1]:11.1e} {errors[2]:11.1e}{time}")


if __name__ == "__main__":
    main()
