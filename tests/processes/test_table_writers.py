# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Processes that write to the same table of tuned settings."""

import subprocess
import sys
from pathlib import Path

from table_cases import TARGET

from tilegym_rmsnorm.backends.cutile.runtime import tables

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/support")
from table_cases import BUCKET, TARGET, VARIANT, entry_of
from tilegym_rmsnorm.backends.cutile.runtime import tables
for n in range(int(sys.argv[2]), 40, 2):
    tables.update(Path(sys.argv[1]), TARGET, [entry_of(BUCKET._replace(n=4000 + n), VARIANT)])
"""


def test_two_processes_that_write_lose_nothing(folders):
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(folders[0]), str(first)], cwd=root)
        for first in (0, 1)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert {record.first for record in tables.table_in(folders[0], TARGET)} == set(range(4000, 4040))
