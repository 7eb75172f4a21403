# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Writes the table of docs/residual-bias-heads.md: what each kind of call came to on each backend, in the tests here.

python scripts/docs_variants.py     after a change of VARIANTS in tests/support/variants.py, or of what a backend takes
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "residual-bias-heads.md"
TABLE = re.compile(r"^\| call \|.*\n(?:\|.*\n)+", re.MULTILINE)
TESTS = ("forward", "backward", "bitwise")
CASE = re.compile(r"test_(\w+)\[(\w+)-(.+)\]")


def outcomes(report: Path) -> dict[tuple[str, str], dict[str, str]]:
    """By call and backend, what each test came to: "passed", "refused", "skipped" or "failed"."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for case in ET.parse(report).iter("testcase"):
        match = CASE.fullmatch(case.get("name", ""))
        if match is None or match[1] not in TESTS:
            continue
        outcome = "passed"
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
        elif (skipped := case.find("skipped")) is not None:
            outcome = "refused" if "refused" in skipped.get("message", "") else "skipped"
        found.setdefault((match[3], match[2]), {})[match[1]] = outcome
    return found


def cell(tests: dict[str, str]) -> str:
    if set(tests.values()) == {"refused"}:
        return "refused"
    passed = [name for name in TESTS if tests.get(name) == "passed"]
    return ", ".join(passed) or "not tested"


def table(found: dict[tuple[str, str], dict[str, str]]) -> str:
    calls = list(dict.fromkeys(call for call, _ in found))
    backends = [
        name for name in ("cutile", "triton", "inductor", "torch") if any(b == name for _, b in found)
    ]
    rows = [f"| call | {' | '.join(f'`{name}`' for name in backends)} |", "|---" * (len(backends) + 1) + "|"]
    rows += [
        f"| {call} | " + " | ".join(cell(found.get((call, name), {})) for name in backends) + " |"
        for call in calls
    ]
    return "\n".join(rows) + "\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        tests = [f"tests/api/test_variants.py::test_{name}" for name in TESTS]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *tests], cwd=ROOT
        )
        found = outcomes(report)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(TABLE.sub(lambda _: table(found), page), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
