# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""README.md: its snippets run and print what it shows, its links lead somewhere, its versions are the package's."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tilegym_rmsnorm import RMSNorm, is_backend_available

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
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
    if not is_backend_available("inductor"):  # on a CPU it lacks a C++ compiler
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


def test_every_way_of_use_has_a_snippet():
    for word in ("rms_norm(", "LlamaRMSNorm", "torch.compile(", "fully_shard("):
        assert any(word in snippet for snippet in SNIPPETS), word


def test_ddp_gives_the_gradients_of_the_model_alone():
    """In one process on the CPU; README says that the kernels run."""

    def gradients(wrap):
        torch.manual_seed(0)
        model = wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), RMSNorm(8), torch.nn.Linear(8, 1)))
        model(torch.randn(4, 8)).sin().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(lambda model: model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = gradients(torch.nn.parallel.DistributedDataParallel)
    finally:
        dist.destroy_process_group()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_it_is_short_and_one_picture_is_enough():
    assert len(TEXT.splitlines()) <= 150
    assert TEXT.count("![") <= 1


def test_links_lead_to_files():
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link]
    assert not [link for link in links if not (ROOT / link).exists()]


def test_commands_exist():
    assert all(
        f"`{path}`" in TEXT and os.access(ROOT / path, os.X_OK) for path in ("tests/run.sh", "bench/run.sh")
    )
    lines = [line.partition(" #")[0].split() for block in COMMANDS for line in block.splitlines()]
    for words in lines:
        if words[:3] == ["python", "-m", "tilegym_rmsnorm"]:
            assert (ROOT / "tilegym_rmsnorm" / "commands" / f"{words[3]}.py").exists()
        else:
            assert words[:2] == ["pip", "install"], words
            extra = re.search(r"\[(\w+)\]", words[-1])
            assert extra is None or f"\n{extra[1]} = [" in PROJECT


def test_versions_are_those_of_the_package():
    from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES
    from tilegym_rmsnorm.backends.cutile.runtime.toolchain import OLDEST_DRIVER

    (python,) = re.findall(r'requires-python = ">=(.*?)"', PROJECT)
    (pytorch,) = re.findall(r'"torch>=(.*?)"', PROJECT)
    assert f"Python {python} or later and PyTorch {pytorch} or later" in TEXT
    assert f"GPUs of sm_{', '.join(map(str, ARCHITECTURES))} |" in TEXT
    assert "r580" in TEXT and OLDEST_DRIVER == (13, 0)  # the CUDA version of driver r580


def test_the_newest_version_of_the_changelog_is_the_package_s():
    (version,) = re.findall(r'^version = "(.*?)"', PROJECT, re.MULTILINE)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d\S*) - (?:\d{4}-\d\d-\d\d|unreleased)$", text, re.MULTILINE)[0] == version
