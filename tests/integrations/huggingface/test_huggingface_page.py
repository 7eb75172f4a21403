# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""docs/huggingface.md: its snippets print what it shows, and its figures are those of the tests."""

import contextlib
import io
import re
import textwrap
from pathlib import Path

from hf_models import ARCHITECTURES
from test_hf_attention_classes import REWRITTEN as ATTENTION
from test_hf_classes import DECLINED_RMS_NORMS, EXPECTED, REWRITTEN

from tilegym_rmsnorm.integrations.huggingface.arithmetic import ARITHMETICS

PAGE = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text(encoding="utf-8")


def test_snippets_print_what_is_shown():
    scope, shown_blocks = {}, 0
    blocks = re.findall(r"^```python\n(.*?)^```\n\n((?:    [^\n]*\n)*)", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for snippet, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(snippet, "docs/huggingface.md", "exec"), scope)
        assert output.getvalue() == textwrap.dedent(shown)
        shown_blocks += bool(shown)
    assert shown_blocks == 3


def test_the_table_of_arithmetics():
    rows = re.findall(r"^\| `([\w ]+)` \| (.*?) \| (\d* ?)\| .* \|$", PAGE, re.MULTILINE)
    assert {name: meaning for name, meaning, _ in rows} == {
        name: meaning for name, (meaning, _) in ARITHMETICS.items()
    }
    counts = {name: int(count) for name, _, count in rows if count.strip()}
    assert counts == {name: count for name, count in EXPECTED.items() if name != "declined"}
    text = " ".join(PAGE.split())
    assert f"these are {sum(counts.values())} classes" in text
    assert f"are {sum(DECLINED_RMS_NORMS.values())} classes named RMSNorm: the 14 gated ones" in text
    assert f"{sum(REWRITTEN.values())} classes of layers" in text
    assert f"{ATTENTION} classes of attention" in text
    assert DECLINED_RMS_NORMS["takes more than one tensor"] == 14
    assert f"{len(ARCHITECTURES)} architectures" in text
