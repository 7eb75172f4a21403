# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Command line: `python -m tilegym_rmsnorm doctor` and `tune`."""

import argparse
import os
import sys

from tilegym_rmsnorm import doctor, tune

SIGPIPE = 13  # by number, since Windows does not name it


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's own) name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tilegym_rmsnorm", description="Tools of tilegym_rmsnorm."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_command(commands)
    tune.add_command(commands)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except BrokenPipeError:  # `... | head`: who reads has seen enough
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or Python complains as it flushes at its end
        return 128 + SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
