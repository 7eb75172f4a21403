# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Command line: `python -m tilegym_rmsnorm doctor` and `tune`."""

import argparse
import sys

import torch

import tilegym_rmsnorm
from tilegym_rmsnorm.backends.versions import package_version
from tilegym_rmsnorm.commands import doctor, tune


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (default: the process's own) name; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tilegym_rmsnorm",
        description="Tools of tilegym_rmsnorm.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # versions in one line, however narrow the terminal
    )
    parser.add_argument("--version", action="version", version=_versions())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_command(commands)
    tune.add_command(commands)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def _versions() -> str:
    """One line: this package, and what of those that choose its kernels is found here."""
    found = [f"tilegym_rmsnorm {tilegym_rmsnorm.__version__}", f"torch {torch.__version__}"]
    found += [f"{name} {package_version(name) or 'not installed'}" for name in ("cuda-tile", "triton")]
    return ", ".join(found)


if __name__ == "__main__":
    sys.exit(main())
