# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Stops inside a cuTile kernel, on a CPU, with pdb.

    python examples/step_through_kernel.py                 types the commands below for you
    python examples/step_through_kernel.py --interactive   leaves the typing to you: begin with c

The kernels are Python. TILEGYM_RMSNORM_INTERPRET=1 runs that Python over CPU tensors, one thread block after the other.
This stops in the kernel `forward_tiles`, once it has rstd = 1 / sqrt(mean(x^2) + eps), and prints the tiles it has by
then: tx[0] with the rows of x, and trstd with one number a row. A tile has 64 rows, x has three: the others repeat its
last row, and are not written. Other kernels: see "Step through a kernel" in CONTRIBUTING.md.
"""

import argparse
import inspect
import io
import os
import pdb
import sys

import torch

from tilegym_rmsnorm import rms_norm
from tilegym_rmsnorm.backends.cutile.kernels import forward_tiles

STOP_AT = "store_rstd_at(rstd"  # the line of the kernel that writes rstd
COMMANDS = """\
continue
p x.shape
p place
p tx[0]
p trstd
continue
"""


class Typing(pdb.Pdb):
    """Reads COMMANDS, and shows them as if somebody typed them.

    Not from `cmdqueue`: while commands wait there, pdb of Python 3.12 and later does not say where it stopped.
    """

    def __init__(self) -> None:
        super().__init__(stdin=io.StringIO(COMMANDS), stdout=sys.stdout, readrc=False)

    def precmd(self, line: str) -> str:
        print(line)
        return super().precmd(line)


def stop_line() -> int:
    lines, first = inspect.getsourcelines(forward_tiles)
    return first + next(number for number, line in enumerate(lines) if STOP_AT in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--interactive", action="store_true", help="read pdb's commands from the keyboard")
    options = parser.parse_args()

    os.environ["TILEGYM_RMSNORM_INTERPRET"] = "1"  # before the first call
    x = torch.tensor([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [4.0, 4.0, 4.0, 4.0]])
    weight = torch.ones(4)
    debugger = pdb.Pdb() if options.interactive else Typing()
    debugger.set_break(inspect.getfile(forward_tiles), stop_line(), temporary=True)
    y = debugger.runcall(rms_norm, x, (4,), weight, 1e-6, backend="cutile")
    print("y:", y)


if __name__ == "__main__":
    main()
