# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Type-checks the Python snippets of README.md and the programs of examples/ against this checkout's package.

python scripts/readme_types.py     prints mypy's messages, with README's line numbers; exit status 0 if there is none
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python_blocks(text: str) -> list[str]:
    """The Python blocks of a Markdown text, each behind as many empty lines as there are lines before it."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def check(sources: list[str], programs: list[Path]) -> tuple[int, str]:
    """mypy's exit status and messages for these sources and files, by the settings of pyproject.toml."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"README_example_{number}.py" for number, _ in enumerate(sources, 1)]
        for path, source in zip(paths, sources, strict=True):
            path.write_text(source, encoding="utf-8")
        # By the options of `mypy -p tilegym_rmsnorm`, whose cache then saves it half a minute.
        command = [sys.executable, "-m", "mypy", "--no-error-summary"]
        done = subprocess.run(
            [*command, *map(str, paths), *(str(program.relative_to(ROOT)) for program in programs)],
            cwd=ROOT,
            env=os.environ | {"MYPYPATH": str(ROOT)},
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
    status, text = check(blocks, EXAMPLES)
    passed = f"README.md: {len(blocks)} snippets pass; examples/: {len(EXAMPLES)} programs pass"
    print(text or passed, end="" if text else "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
