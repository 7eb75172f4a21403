# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The snippets of docs/torch-compile.md, in a row, as a reader runs them."""

import re
import subprocess
import sys
from pathlib import Path

from helpers import needs_inductor

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "torch-compile.md").read_text(), re.MULTILINE | re.DOTALL
)


@needs_inductor
def test_the_page_runs():
    assert len(BLOCKS) == 2
    program = (
        "\n".join(BLOCKS) + '\nassert y.shape == (3, 512) and norm.weight.grad is not None\nprint("ran")\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "ran\n", done.stderr[-4000:]
