# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiles the Triton kernels for any architecture, without a GPU, and prints what became of them as JSON.

A driver that stands in for CUDA's lets the backend's own launches compile for the target, takes the cubin where it
would be loaded, and runs nothing. A program of its own: Triton compiles for one kind of GPU per process, and not where
it interprets.

It reads requests, a line each, and answers each with a line: a list with the kernels that each call (arguments of
`run`, or the fields of a RopeCase, or those of a NormCase and of its variant, or of vllm_kernel.py) compiled and
earlier ones of the request had not, or null, and why on stderr. cache: the folder for Triton's, or null for the usual
one.

    [90, [{"N": 4096, "dtype": "bfloat16", "weight_dtype": "float32"}, ...], cache]

Each request has a process of its own, forked from this one: to import PyTorch and Triton takes longer than to compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import vllm_kernel
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[2]))

from option_cases import NormCase, run_norm
from rope_cases import RopeCase
from rope_cases import make as make_rope
from variants import Variant, make

from tilegym_rmsnorm.backends.triton import host, launch
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

SM_COUNT = 132  # the dw tile depends on it
# Bytes that a block may have on sm_86, 89 and 120. The other architectures have more.
SMALLEST_SHARED_MEMORY = 101376


class Kernel(NamedTuple):
    name: str
    registers: int
    stack: int
    shared: int


class Compiler:
    """Stand-in for Triton's driver and its utilities, for a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.utils = self
        self.kernels: list[Kernel] = []

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SMALLEST_SHARED_MEMORY}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int, *_: Any) -> tuple:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
        self.kernels.append(Kernel(name, registers, stack, shared))
        # Module, function, registers, spills, most threads per block.
        return object(), None, registers, 0, 1024


def run(
    N: int,
    dtype: str,
    weight_dtype: str | None,
    casting: str = "once",
    M: int = 3,
    row_stride: int | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    heads: tuple[int, int, int] | None = None,
    strides: tuple[int, ...] | None = None,
    residual_dtype: str | None = None,
    residual_out_dtype: str | None = None,
    alpha: float = 1.0,
    bias_dtype: str | None = None,
    is_per_head: bool = False,
    adds: bool = False,
    reproducible: int = 0,
    begin: int = 0,
    is_frozen: bool = False,
) -> None:
    """A forward and a backward with all gradients, of M rows or of `heads`, (B, T, H). adds: dw is added to float32.
    begin: elements before the first of each input. is_frozen: without dw.

    Rows of heads lie as in q of (B, T, 3, H, N), and those of dy as in (B, H, T, N), unless `strides` says it for both.
    """

    def late(tensor: torch.Tensor | None) -> Any:
        if not begin or tensor is None:
            return tensor
        memory = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize + begin, dtype=tensor.dtype)
        return memory[begin:].as_strided(tensor.shape, tensor.stride())

    x = _rows(N, dtype, M, row_stride, heads, strides, "slice")
    dy = _rows(N, dtype, M, row_stride, heads, strides, "transposed")
    residual = residual_out = None
    if residual_dtype is not None:
        residual = _rows(N, residual_dtype, M, row_stride, heads, strides, "slice")
        residual_out = torch.empty(x.shape, dtype=_dtype(residual_out_dtype))
    vector = x.shape[-2:] if is_per_head else (N,)
    weight, bias = (
        None if each is None else torch.empty(vector, dtype=_dtype(each))
        for each in (weight_dtype, bias_dtype)
    )
    x, dy, residual, weight, bias = map(late, (x, dy, residual, weight, bias))
    numbers = N, eps, offset, casting, alpha, x.dtype, _dtype(residual_out_dtype)
    spec = Spec(*numbers, reproducible=reproducible)
    _, rstd, _ = launch.rms_norm_forward(spec, (x, weight, bias, residual))
    shared = residual is None or (alpha == 1 and residual.dtype == x.dtype)
    dw_dtype = None if is_frozen else _dtype(weight_dtype)
    dtypes = x.dtype, None if shared else residual.dtype, dw_dtype, _dtype(bias_dtype)
    rstd, residual_out = late(rstd), late(residual_out)
    normalized = x if residual is None else residual_out
    target = (torch.empty(vector, dtype=torch.float32),) if adds else ()
    launch.rms_norm_backward(spec, (normalized, dy, weight, rstd, residual_out, *target), Wanted(*dtypes))


def run_rope(case: RopeCase, reproducible: int) -> None:
    """A forward and a backward of qk_norm_rope."""
    call = make_rope(case, "meta")
    call = call._replace(spec=call.spec._replace(reproducible=reproducible))
    launch.qk_norm_rope_forward(call.spec, call.tensors)
    launch.qk_norm_rope_backward(call.spec, call.backward_tensors, call.wanted)


def run_call(call: dict[str, Any]) -> None:
    if "vllm" in call:
        n, dtype, weight_dtype = call["vllm"], _dtype(call["dtype"]), _dtype(call["weight_dtype"])
        vllm_kernel.rms_norm(torch.empty(3, n, dtype=dtype), torch.empty(n, dtype=weight_dtype), 1e-6)
    elif "N" in call:
        run(**call)
    else:
        run_fields(call)


def run_fields(call: dict[str, Any]) -> None:
    """Run a RopeCase, or a NormCase and its variant."""
    fields = {name: _dtype(value) if name.endswith("dtype") else value for name, value in call.items()}
    if "rotary_dim" in fields:
        reproducible = fields.pop("reproducible", 0)
        run_rope(RopeCase(**fields), reproducible)
        return
    variant = Variant(**{name: fields.pop(name) for name in Variant._fields})
    case = NormCase(variant, **fields)
    inputs = make(variant, dy_dtype=case.dy_dtype, device="meta")
    run_norm(case, inputs, launch.rms_norm_forward, launch.rms_norm_backward)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name.removeprefix("torch."))


def _rows(
    N: int,
    dtype: str,
    M: int,
    row_stride: int | None,
    heads: tuple[int, int, int] | None,
    strides: tuple[int, ...] | None,
    layout: str,
) -> torch.Tensor:
    if heads is None:
        return torch.empty(M, row_stride or N, dtype=_dtype(dtype))[:, :N]
    B, T, H = heads
    if strides is not None:
        return torch.empty_strided((B, T, H, N), (*strides, 1), dtype=_dtype(dtype))
    if layout == "slice":
        return torch.empty(B, T, 3, H, N, dtype=_dtype(dtype))[:, :, 1]
    return torch.empty(B, H, T, N, dtype=_dtype(dtype)).transpose(1, 2)


def compile_calls(
    capability: int, calls: list[dict[str, Any]], cache: str | None
) -> list[list[dict[str, Any]]]:
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = cache
    compiler = Compiler(capability)
    triton.runtime.driver.set_active(compiler)
    host.sm_count = lambda device: SM_COUNT
    compiled = []
    for call in calls:
        known = len(compiler.kernels)
        try:
            run_call(call)
        except Exception as error:
            raise RuntimeError(f"sm_{capability} does not compile {call}") from error
        compiled.append([kernel._asdict() for kernel in compiler.kernels[known:]])
    return compiled


def main() -> None:
    for request in sys.stdin:
        process = os.fork()
        if process == 0:
            try:
                print(json.dumps(compile_calls(*json.loads(request))), flush=True)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        if os.waitpid(process, 0)[1]:
            print("null", flush=True)


if __name__ == "__main__":
    main()
