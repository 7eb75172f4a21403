# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Command line: `python -m tilegym_rmsnorm doctor` and `tune`."""

import argparse
import sys

from tilegym_rmsnorm import doctor, tune


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's own) name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tilegym_rmsnorm", description="Tools of tilegym_rmsnorm."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_command(commands)
    tune.add_command(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
