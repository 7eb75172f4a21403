# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The program of docs/distributed.md, all of its snippets in a row, as the page says to start it."""

import re
from pathlib import Path

import pytest
import torch
from processes import run_script

dist = pytest.importorskip("torch.distributed")
ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "docs" / "distributed.md").read_text(), re.MULTILINE | re.DOTALL
)


@pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_the_page_runs(tmp_path):
    assert len(BLOCKS) == 5
    program = tmp_path / "page.py"
    program.write_text("\n".join(BLOCKS) + f'\nopen("{tmp_path}/ran" + os.environ["RANK"], "w").close()\n')
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = run_script(*launcher, program, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 0 and len(list(tmp_path.glob("ran?"))) == 2, done.stderr[-4000:]
