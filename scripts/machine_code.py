# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Whether a change leaves the machine code of the kernels as it is. It needs cuda-tile and tileiras, and no GPU.

    python scripts/machine_code.py write NEW.json [OLD.json]     hashes of the code of what is selected
    python scripts/machine_code.py compare OLD.json NEW.json     what differs; exits with 1 if anything does

To compare two commits, write a file in a clone of each, the second with the first as OLD.json: it then compiles the
same cases. A case is a call of rows of N elements; its hashes are of the instructions of each of its kernels, not of
their names, beside their grids. Cases are chosen from tests/plans/selected.txt: of each selection, dtype and weight one
width, and of these every third for sm_90 and every eighth for other architectures; every seventh with casting="llama".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "plans")]

import plain_calls  # noqa: E402
import selection  # noqa: E402
import torch  # noqa: E402
from compiling import CompilingMachine, compiled, meta, signature_of  # noqa: E402
from cuda.tile.compilation import export_kernel  # noqa: E402

from tilegym_rmsnorm.backends.cutile.host.norm import Backward, Forward  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.problem import PLAIN  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class  # noqa: E402

ROWS = (4096, 1040, 1024, 512, 256, 128, 64, 32, 16, 8, 1)  # the first of the size class
# Hashes of this process, by all that the compiler tells kernels apart by
_known: dict[tuple[Any, ...], str] = {}


class HashingMachine(CompilingMachine):
    """Keeps the hash of the instructions of each launch, and its grid, in `hashes`."""

    def __init__(self, facts: Any) -> None:
        super().__init__(facts.architecture)
        self.facts, self.hashes = facts, []

    def bind(self, function: Any, variant: Any, constants: tuple[Any, ...]) -> Any:
        def launch(grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
            signature = signature_of(arguments, constants).with_mangled_symbol("kernel")
            hints = (variant.warps, variant.occupancy)
            key = (self.facts.architecture, function, signature.symbol, *hints)
            if key not in _known:
                with tempfile.TemporaryDirectory() as folder:
                    cubin, code = Path(folder) / "kernel.cubin", f"sm_{self.facts.architecture}"
                    kernel = compiled(function, *hints)
                    export_kernel(kernel, [signature], cubin, gpu_code=code, output_format="cubin")
                    _known[key] = hashlib.sha256(instructions(cubin.read_bytes())).hexdigest()[:16]
            self.hashes.append([_known[key], list(grid)])

        return launch


def instructions(cubin: bytes) -> bytes:
    """The .text sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    text = b""
    for name, _, _, _, offset, length, *_ in headers:
        start = headers[names][4] + name
        if cubin[start : cubin.index(b"\0", start)].startswith(b".text"):
            text += cubin[offset : offset + length]
    assert text, "no .text section"
    return text


def cases() -> Iterator[str]:
    """GPU, op, dtype, weight, size class, N, whether casting is "llama", and M."""
    seen, number = set(), 0
    for key, _, ranges in selection.read():
        gpu, op, dtype, weight, size = key
        if selection.form_of(op)[1] != PLAIN:
            continue  # tests/machine_code/test_machine_code.py compiles those
        architecture = selection.DEVICES[gpu].architecture
        for first, last, chosen in ranges:
            kind = architecture, chosen, op, dtype, weight
            if kind in seen:
                continue
            seen.add(kind)
            number += 1
            if number % (3 if architecture == 90 else 8) == 0:
                n = last if number % 2 else first
                rows = rows_of_class(size, n)
                m = next(m for m in (*ROWS, rows[0] // 16 * 16 + 16, rows[0]) if m in rows)
                yield " ".join(map(str, (*key, n, number % 7 == 0, m)))


def hashes_of(case: str) -> tuple[str, list[Any]]:
    *key, n, is_llama, m = case.split()
    m, n = int(m), int(n)
    plan = selection.plan_of_key(tuple(key), n, casting="llama" if is_llama == "True" else "once")
    dtype = getattr(torch, plan.problem.dtype)
    machine, weight = HashingMachine(plan.problem.device), meta(n, dtype=getattr(torch, plan.problem.weight))
    x = meta(m, n, dtype=dtype)
    if plan.problem.op == "forward":
        plain_calls.forward(Forward(machine, plan), x, weight, 1e-6, 0.0)
    else:
        rstd = meta(m, dtype=torch.float32)
        plain_calls.backward(Backward(machine, plan), x, x.clone(), weight, rstd, 0.0)
    return case, machine.hashes


def write(new: Path, old: Path | None) -> int:
    todo = list(json.loads(old.read_text())) if old else list(cases())
    with ProcessPoolExecutor() as pool:
        new.write_text(json.dumps(dict(pool.map(hashes_of, todo, chunksize=16)), indent=0))
    print(f"{len(todo)} cases")
    return 0


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(path.read_text()) for path in (old, new))
    different = sorted(case for case in before.keys() | after.keys() if before.get(case) != after.get(case))
    print(f"{len(before)} and {len(after)} cases, {len(different)} differ", *different, sep="\n")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    writing = commands.add_parser("write", help="hash what is selected")
    writing.add_argument("new", type=Path)
    writing.add_argument("old", type=Path, nargs="?", help="whose cases are compiled")
    writing.set_defaults(run=write)
    comparing = commands.add_parser("compare", help="say what differs")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.set_defaults(run=compare)
    arguments = vars(parser.parse_args())
    return arguments.pop("run")(**arguments)


if __name__ == "__main__":
    sys.exit(main())
