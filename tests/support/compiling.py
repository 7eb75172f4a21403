# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The machine that compiles instead of launching, for any architecture and without a driver, and what its kernels use:
tileiras needs no GPU, and tensors of device "meta" no memory."""

import functools
import gc
import hashlib
import io
import os
import pickle
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cuda.tile as ct
import helpers
import plain_calls
import planning
import pytest
import torch
from cuda.tile.compilation import (
    ArrayConstraint,
    CallingConvention,
    KernelSignature,
    ScalarConstraint,
    TupleConstraint,
    export_kernel,
)

from tilegym_rmsnorm.backends.cutile.host.norm import Backward, Forward
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import Device
from tilegym_rmsnorm.backends.cutile.plans.select import Choice
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime import toolchain
from tilegym_rmsnorm.backends.cutile.runtime.machine import compiled

TILE_DTYPE = {
    torch.float16: ct.float16,
    torch.bfloat16: ct.bfloat16,
    torch.float32: ct.float32,
    torch.int32: ct.int32,
    torch.int64: ct.int64,
}
WIDEST = 50000  # columns of a sweep; test_compile.py has wider backwards, by teams of other parts


class Compiled(NamedTuple):
    """Result of compiling one kernel. registers: of a thread as it starts; stack: bytes a thread, above 0 registers
    spill to local memory; lacking: registers that a block's warps ask for and that it does not have; spills: the reason
    in the record that chose the kernel."""

    name: str
    variant: Variant
    registers: int
    stack: int
    lacking: int
    spills: str = ""


# Kernels that this process compiled, each with its cubin: tests share many. The function itself is in the key, since
# tests have kernels of their own by the names of others.
_Key = tuple[int, Callable[..., None], str, int, int]
_KNOWN: dict[_Key, tuple[Compiled, bytes]] = {}


def _known(key: _Key, compile_now: Callable[[], tuple[Compiled, bytes]]) -> tuple[Compiled, bytes]:
    """Return what this process or another of this run (`helpers.shared`) compiled; else compile now."""
    if key not in _KNOWN:
        architecture, function, *rest = key
        name = repr((architecture, function.__module__, function.__qualname__, *rest)).encode()
        file = helpers.shared and helpers.shared / f"{hashlib.sha256(name).hexdigest()}.cubin"
        if file is not None and file.exists():
            _KNOWN[key] = pickle.loads(file.read_bytes())
        else:
            _KNOWN[key] = compile_now()
            if file is not None:
                unfinished = file.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(pickle.dumps(_KNOWN[key]))
                unfinished.replace(file)
    return _KNOWN[key]


def sampled(cases: Iterable[tuple[Any, ...]], step: int = 1) -> list[tuple[Any, ...]]:
    """Keep the last case of each kernel and every (60 * step)-th before it; with --every-config every step-th. Each
    case has a Choice or a Variant."""
    step *= 1 if helpers.every_config else 60
    kept, counts = [], Counter()
    for case in reversed(list(cases)):
        [kernel] = {first_of(part).kernel for part in case if isinstance(part, (Choice, Variant))}
        if counts[kernel] % step == 0:
            kept.append(case)
        counts[kernel] += 1
    return kept


class CompilingMachine:
    """Compiles each launch for `architecture`. Keeps `results`, and the distinct `symbols` of each kernel by its name,
    which hold all that cuda-tile's JIT tells kernels apart by.

    compiles=False: only the symbols. traces: what is not compiled becomes bytecode, by cuTile alone: names and types
    are checked, in a third of the time. keep: a folder for the cubins, each by its kernel's name.
    """

    def __init__(
        self,
        architecture: int,
        compiles: bool = True,
        sm_count: int = 132,
        keep: Path | None = None,
        traces: bool = False,
    ) -> None:
        self.facts = Device(architecture, sm_count, sm_count // 8)
        self.no_array = torch.empty(64, device="meta")
        self.compiles, self.traces, self.keep = compiles, traces, keep
        self.spills = ""  # of the plan that launches now
        self.results: list[Compiled] = []
        self.symbols: dict[str, set[str]] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def bind(
        self, function: Callable[..., None], variant: Variant, constants: tuple[Any, ...]
    ) -> Callable[..., None]:
        name = function.__name__

        def launch(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            signature = signature_of(arguments, constants).with_mangled_symbol(name)
            symbols = self.symbols.setdefault(name, set())
            is_new = signature.symbol not in symbols
            symbols.add(signature.symbol)
            if not self.compiles:
                if self.traces and is_new:
                    self._export(function, signature, variant, io.BytesIO(), "tileir_bytecode")
                return
            key = (self.facts.architecture, function, signature.symbol, variant.warps, variant.occupancy)
            known, cubin = _known(key, lambda: self._compiled(function, signature, variant))
            self.results.append(known._replace(variant=variant, spills=self.spills))
            if self.keep is not None:
                (self.keep / f"{name}.cubin").write_bytes(cubin)

        return launch

    def _compiled(
        self, function: Callable[..., None], signature: KernelSignature, variant: Variant
    ) -> tuple[Compiled, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            self._export(function, signature, variant, cubin, "cubin")
            registers, stack = resource_usage(cubin)
            lacking = lacking_registers(cubin, registers, variant.warps)
            return Compiled(function.__name__, variant, registers, stack, lacking), cubin.read_bytes()

    def _export(
        self,
        function: Callable[..., None],
        signature: KernelSignature,
        variant: Variant,
        output: Path | io.BytesIO,
        output_format: Literal["cubin", "tileir_bytecode"],
    ) -> None:
        kernel, architecture = compiled(function, variant.warps, variant.occupancy), self.facts.architecture
        was_enabled = gc.isenabled()
        gc.disable()  # cuTile makes so many objects that looking for garbage took 40 % of its time
        try:
            export_kernel(
                kernel, [signature], output, gpu_code=f"sm_{architecture}", output_format=output_format
            )
        finally:
            if was_enabled:
                gc.enable()


def assert_sound(machine: CompilingMachine, most_stack: int = 0) -> None:
    """No kernel waits for registers, and none spills more bytes than that, unless its record says why."""
    assert_ends(machine)
    spilling = [each for each in machine.results if each.stack > most_stack and not each.spills]
    assert not spilling, f"sm_{machine.facts.architecture}: registers spill to local memory: {spilling}"


def assert_ends(machine: CompilingMachine) -> None:
    assert machine.results
    waiting = [result for result in machine.results if result.lacking > 0]
    assert not waiting, f"sm_{machine.facts.architecture}: warps wait forever for registers: {waiting}"


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def first_of(choice: Choice | Variant) -> Variant:
    return choice.first if isinstance(choice, Choice) else choice


def _plan(machine, choice, op, n, dtype, weight_dtype, round_xhat, **options) -> Plan:
    casting = "llama" if round_xhat else "once"
    made = planning.plan(
        choice, op, n, dtype, weight=weight_dtype, facts=machine.facts, casting=casting, **options
    )
    machine.spills = made.spills
    return made


def run_forward(machine, choice, n, dtype, weight_dtype, round_xhat=False, m=4096, eps=1e-6):
    """The launches of a forward of (m, n), by this first kernel: a Choice or a Variant."""
    weight = None if weight_dtype is None else meta(n, dtype=weight_dtype)
    run = Forward(machine, _plan(machine, choice, "forward", n, dtype, weight_dtype, round_xhat))
    plain_calls.forward(run, meta(m, n, dtype=dtype), weight, eps, 0.0)


def run_backward(machine, choice, n, dtype, weight_dtype, round_xhat=False, has_dw=True, m=4096, **options):
    """The launches of a backward of (m, n), by this first kernel: a Choice or a Variant. options: fields of Problem."""
    weight = None if weight_dtype is None else meta(n, dtype=weight_dtype)
    op = "backward" if has_dw and weight is not None else "dx"
    run = Backward(machine, _plan(machine, choice, op, n, dtype, weight_dtype, round_xhat, **options))
    x, dy, rstd = meta(m, n, dtype=dtype), meta(m, n, dtype=dtype), meta(m, dtype=torch.float32)
    plain_calls.backward(run, x, dy, weight, rstd, 0.0)


def code_of_call(
    folder: Path,
    op: str,
    choice: Choice | Variant,
    n: int,
    dtype,
    weight_dtype,
    architecture: int = 90,
    **options,
) -> dict[str, list[str]]:
    """The machine code of each kernel of a forward, a backward or a dx of (m, n), by its name; m is 4096 unless given.
    folder: an empty one, which is left so."""
    machine = CompilingMachine(architecture, keep=folder)
    if op == "forward":
        run_forward(machine, choice, n, dtype, weight_dtype, **options)
    else:
        run_backward(machine, choice, n, dtype, weight_dtype, has_dw=op == "backward", **options)
    found = {}
    for cubin in folder.glob("*.cubin"):
        found[cubin.stem] = disassembled(cubin)
        cubin.unlink()
    return found


def signature_of(arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> KernelSignature:
    """Return the signature that cuda-tile's JIT compiles for these arguments (tests/gpu/test_gpu_cutile.py compares
    them). cuda-tile compiles extents of 1 in. For these and for tuples it takes its second calling convention."""
    needs_second = any(map(_needs_second_convention, arguments))
    convention = CallingConvention.cutile_python_v2 if needs_second else CallingConvention.cutile_python_v1
    return KernelSignature([*map(_constraint, arguments), *constants], convention())


def _needs_second_convention(argument: Any) -> bool:
    return isinstance(argument, tuple) or (isinstance(argument, torch.Tensor) and 1 in argument.shape)


def _constraint(
    argument: torch.Tensor | float | tuple[Any, ...],
) -> ArrayConstraint | ScalarConstraint | TupleConstraint:
    """Return what cuda-tile assumes of an argument: of an array its dtype, which extents and strides are 1, which
    extents are multiples of 16, and which strides of 16 bytes. DLPack of torch 2.9 may give an extent of 1 stride 1."""
    if isinstance(argument, tuple):
        return TupleConstraint(tuple(map(_constraint, argument)))
    if not isinstance(argument, torch.Tensor):
        return ScalarConstraint(ct.int32 if isinstance(argument, int) else ct.float32)
    lanes = 16 // argument.dtype.itemsize
    strides = argument.stride()
    return ArrayConstraint(
        TILE_DTYPE[argument.dtype],
        argument.ndim,
        index_dtype=ct.int32,
        stride_lower_bound_incl=tuple(None if stride == 1 else 0 for stride in strides),
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=tuple(1 if stride == 1 else None for stride in strides),
        shape_constant=tuple(1 if extent == 1 else None for extent in argument.shape),
        stride_divisible_by=tuple(lanes if stride % lanes == 0 else 1 for stride in strides),
        shape_divisible_by=tuple(16 if extent % 16 == 0 else 1 for extent in argument.shape),
        base_addr_divisible_by=16,
    )


def resource_usage(cubin: Path) -> tuple[int, int]:
    """Registers and bytes of stack that a thread of the kernel in `cubin` uses."""
    command = [str(find_cuobjdump()), "--dump-resource-usage", str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    return int(registers), int(stack)


def disassembled(cubin: Path) -> list[str]:
    """The instructions of the one kernel in `cubin`, in order; each begins with its address."""
    return list(_disassembled(cubin.read_bytes()))


@functools.lru_cache(maxsize=256)  # the sum of dw is the same in many backwards, and starting takes 0.2 s
def _disassembled(cubin: bytes) -> tuple[str, ...]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        # As `cuobjdump -sass` calls it, but for the analysis of branches (-ndf), which nothing printed here needs and
        # which takes a quarter of the time. -pb prints places instead of labels.
        command = [str(find_nvdisasm()), "-pb", "-hex", "-novliw", "-ndf", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(re.findall(r"^\s+/\*([0-9a-f]{4,5}\*/.*?;)", text, re.MULTILINE))


def lacking_registers(cubin: Path, registers: int, workers: int) -> int:
    """Return the registers that warps ask for beyond those their block starts with: then some wait forever.

    A kernel with TMA has warps beside the `workers` of its variant, which load for them. All start with `registers` a
    thread, in steps of 8; the workers ask for more (setmaxnreg.inc) and the others give some back (.dec). The cubin has
    the PTX that says so.
    """
    ptx = cubin.read_bytes()
    threads = re.search(rb"\.reqntid (\d+)", ptx)
    assert threads, f"{cubin} has no PTX"
    more, fewer = (
        [int(each) for each in re.findall(rb"setmaxnreg\.%b\S*\s+(\d+)" % step, ptx)]
        for step in (b"inc", b"dec")
    )
    if not more:
        return 0
    others = int(threads[1]) - 32 * workers
    has = int(threads[1]) * -(-registers // 8) * 8
    return max(0, 32 * workers * max(more) + others * min(fewer, default=registers) - has)


_PACKAGES = Path(sysconfig.get_path("purelib"))
_FOLDERS = (_PACKAGES / "nvidia/cu13/bin", _PACKAGES / "triton/backends/nvidia/bin")


def find_cuobjdump() -> Path | None:
    """The cuobjdump of PATH, of the package nvidia-cuda-cuobjdump, or the one inside Triton's package."""
    return _find("cuobjdump")


def find_nvdisasm() -> Path | None:
    """Find nvdisasm in PATH or Triton's package."""
    return _find("nvdisasm")


def skip_without_compiler() -> None:
    """Skips a module of tests that compile and read what kernels use, where the tools for it are missing."""
    if toolchain.find_tileiras() is None:
        pytest.skip(f"tileiras is not installed ({toolchain.PIP_INSTALL})", allow_module_level=True)
    if find_cuobjdump() is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)", allow_module_level=True)


def skip_without_disassembler(is_module: bool = True) -> None:
    """Skips tests that read machine code, all of a module or the one that calls, where the tools for it are missing."""
    if toolchain.find_tileiras() is None or find_cuobjdump() is None or find_nvdisasm() is None:
        pytest.skip("needs tileiras, cuobjdump and nvdisasm", allow_module_level=is_module)


def _find(program: str) -> Path | None:
    found = shutil.which(program) or shutil.which(program, path=os.pathsep.join(map(str, _FOLDERS)))
    return Path(found) if found else None
