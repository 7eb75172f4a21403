# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Type-checks README.md's Python snippets, the programs of examples/ and the calls of tests/examples/typed_calls.py as
their user would: from an empty folder, against the package as README installs it, `pip install -e`.

python scripts/readme_types.py     prints mypy's messages, with README's line numbers; exit status 0 if there is none
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
CALLS = ROOT / "tests" / "examples" / "typed_calls.py"


def python_blocks(text: str) -> list[str]:
    """The Python blocks of a Markdown text, each behind as many empty lines as there are lines before it."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def install(folder: Path) -> Path:
    """Make an environment that has this checkout, and the packages of this interpreter. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
    # The .pth files of a folder that a .pth file names do not count: a checkout that is installed there stays out.
    (Path(packages.strip()) / "packages.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-qq", "--no-deps"]
    options = ["--ignore-installed", "--no-build-isolation"]
    subprocess.run([*command, *options, "-e", ROOT], check=True, env=clean_environment())
    return python


def clean_environment() -> dict[str, str]:
    """This process's environment without what would let Python or mypy find the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def check(sources: list[str], programs: list[Path]) -> tuple[int, str]:
    """mypy's exit status and messages for these sources and files, by the settings of pyproject.toml."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "empty"
        folder.mkdir()
        paths = [folder / f"README_example_{number}.py" for number, _ in enumerate(sources, 1)]
        for path, source in zip(paths, sources, strict=True):
            path.write_text(source, encoding="utf-8")
        options = ["--config-file", ROOT / "pyproject.toml", "--cache-dir", ROOT / ".mypy_cache"]
        options += ["--python-executable", install(Path(name) / "venv"), "--no-error-summary"]
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, *paths, *programs],
            cwd=folder,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # What mypy has from its cache names the folder of an earlier run.
        return done.returncode, re.sub(
            r"^\S*(README_example_\d+\.py)", r"\1", done.stdout, flags=re.MULTILINE
        )


def main() -> int:
    blocks = python_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    if not blocks:
        print("README.md: expected Python blocks, got none", file=sys.stderr)
        return 1
    status, text = check(blocks, [*EXAMPLES, CALLS])
    passed = f"README.md: {len(blocks)} snippets pass; examples/: {len(EXAMPLES)} programs pass"
    print(text or passed, end="" if text else "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
