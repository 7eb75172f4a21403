# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The snippets of README.md run, and print what it shows."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from helpers import why_no_inductor

ROOT = Path(__file__).resolve().parents[2]
SNIPPETS = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


# One process for all, so that torch is imported once. It ends without Python's clean-up: in torch 2.13 that can wait
# forever to free code that Dynamo has seen and nothing else refers to. What a snippet made stays until then.
PROGRAM = """
import contextlib, io, json, os, sys, traceback
scopes, printed = [], []
for snippet in json.loads(sys.argv[1]):
    scopes.append({"__name__": "__main__"})
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            exec(compile(snippet, "README.md", "exec"), scopes[-1])
        except BaseException:
            traceback.print_exc(file=sys.stdout)
    printed.append(output.getvalue().splitlines())
print(json.dumps(printed), flush=True)
os._exit(0)
"""


def test_snippets_print_what_they_say():
    snippets = [snippet for snippet in SNIPPETS if "transformers" not in snippet or HAS_TRANSFORMERS]
    if why_no_inductor():
        snippets = [snippet for snippet in snippets if "torch.compile" not in snippet]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(snippets)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    said = [re.findall(r"# prints (.*)$", snippet, re.MULTILINE) for snippet in snippets]
    assert all(said) and printed == said
