# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Prints by which keys Triton keeps the kernels of calls, without a GPU and without compiling them: calls with equal
keys run one compiled kernel.

Triton makes the keys itself, of the backend's own launches. A program of its own, as triton_compile.py. It reads
requests, a line each, and answers each with a line: for each call, a list with a key for each launch.

    [["cuda", 90, 32], [{"N": 4096, "dtype": "bfloat16", "weight_dtype": "float32"}, ...], ["M"], "meta"]

The first is a target of Triton, the second are calls, as of triton_compile.py. The third are parameters that Triton is
to compile for, though the kernels forbid it, and the last is the device of arrays of `run`. An answer is null where a
call raises, and why is on stderr.
"""

import json
import sys
import traceback
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton_compile import SM_COUNT, Compiler, run_call

from tilegym_rmsnorm.backends.triton import backward, forward, host, rope

KERNELS = forward.forward, backward.backward, rope.rope


def keys_of(call: dict[str, Any], device: str) -> list[str]:
    found: list[str] = []

    def note(kernel: Any, key: str, *_: Any) -> None:
        found.append(f"{kernel.fn.__name__} {key}")

    triton.JITFunction._do_compile = note
    with torch.device(device):
        run_call(call)
    return found


def main() -> None:
    host.sm_count = lambda device: SM_COUNT
    forbidden = {kernel: [each.do_not_specialize for each in kernel.params] for kernel in KERNELS}
    for request in sys.stdin:
        target, calls, specialized, device = json.loads(request)
        driver = Compiler(0)
        driver.target = GPUTarget(*target)
        triton.runtime.driver.set_active(driver)
        for kernel in KERNELS:
            kernel.device_caches.clear()
            for parameter, is_forbidden in zip(kernel.params, forbidden[kernel], strict=True):
                parameter.do_not_specialize = is_forbidden and parameter.name not in specialized
        try:
            print(json.dumps([keys_of(call, device) for call in calls]), flush=True)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            print("null", flush=True)


if __name__ == "__main__":
    main()
