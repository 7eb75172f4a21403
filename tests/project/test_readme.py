# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""README.md: it is short, its links lead somewhere, its versions are the package's."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import torch.distributed as dist

from tilegym_rmsnorm import RMSNorm

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_way_of_use_has_a_snippet():
    for word in ("rms_norm(", "patch_model(", "torch.compile(", "fully_shard("):
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


def test_figures_in_sentences_are_those_of_the_tables():
    """bench/readme.py writes the tables."""
    (level,) = re.findall(r"^\| NVIDIA H100.*, bfloat16 .*\| +(\d+) of 29 \|$", TEXT, re.MULTILINE)
    assert f"({29 - int(level)} of 29 on an H100)" in TEXT


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
    (gpus,) = re.findall(r"^\| (.* \(sm_.*?) \|", TEXT, re.MULTILINE)
    assert re.findall(r"\((?:sm_)?(\d+)\)", gpus) == list(map(str, ARCHITECTURES))
    assert "r580" in TEXT and OLDEST_DRIVER == (13, 0)  # the CUDA version of driver r580


def test_the_newest_version_of_the_changelog_is_the_package_s():
    """Until it is released, `dev0` says so: a wheel of it is no release."""
    (version,) = re.findall(r'^version = "(.*?)"', PROJECT, re.MULTILINE)
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    form = r"^## (\d\S*) - (\d{4}-\d\d-\d\d|unreleased|never released)$"
    newest, when = re.findall(form, text, re.MULTILINE)[0]
    assert version == (f"{newest}.dev0" if when == "unreleased" else newest)


def test_it_names_no_address_that_does_not_exist():
    """There is no public home yet: no placeholder stands for one."""
    assert "no public home yet" in " ".join(TEXT.split())
    for text in (TEXT, PROJECT):
        assert not re.search(r"git clone|github\.com|example\.(com|org)|\[project\.urls\]", text)
