# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The pages under docs/: examples run, names are of things that exist, lists are whole. And the kernels that
CONTRIBUTING.md names are those that run."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import itertools
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import tilegym_rmsnorm
from tilegym_rmsnorm import registry
from tilegym_rmsnorm.backends.cutile.plans import rules, variants
from tilegym_rmsnorm.backends.cutile.plans.problem import ITEMSIZE, OPS, Device, Form, Problem
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import size_class
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant

ROOT = Path(__file__).resolve().parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "tilegym_rmsnorm"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def script(name: str):
    """One of scripts/docs_*.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def as_torchrun_starts_it(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def left_as_it_was(monkeypatch):
    """What examples change: the norm of transformers' Llama, what is compiled, and how much is logged."""
    log, root = logging.getLogger("tilegym_rmsnorm"), logging.getLogger()
    level, handlers = log.level, list(root.handlers)
    if importlib.util.find_spec("transformers") is not None:
        from transformers.models.llama import modeling_llama

        monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", modeling_llama.LlamaRMSNorm)
    yield
    torch._dynamo.reset()
    log.setLevel(level)
    root.handlers[:] = handlers


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_examples(path, monkeypatch, as_torchrun_starts_it, left_as_it_was):
    """Blocks of Python one after the other, as a reader would type them; then all that has a prompt."""
    monkeypatch.setenv("TILEGYM_RMSNORM_CACHE_DIR", "off")
    text, names = path.read_text(encoding="utf-8"), {"__name__": path.stem}
    for match in BLOCK.finditer(text):
        if "transformers" in match[1]:
            pytest.importorskip("transformers", reason="transformers is not installed")
        source = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(source, str(path), "exec"), names)
    examples = doctest.DocTestParser().get_doctest(text.replace("```", ""), names, path.name, str(path), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not runner.run(examples).failed


NOTES = [ROOT / "bench" / name for name in ("NOTES.md", "README.md")]


@pytest.mark.parametrize("path", [*PAGES, *NOTES], ids=lambda path: path.stem)
def test_paths_that_a_page_names_exist(path):
    """Links, and names of files and folders in `code`, from the page, the root, the package, or tests/."""
    text = path.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    names = re.findall(r"`([\w./*-]+(?:\.py|\.json|\.txt|\.md|/))`", text)
    folders = (
        path.parent,
        ROOT,
        PACKAGE,
        PACKAGE / "backends" / "cutile",
        PACKAGE / "measure",
        ROOT / "tests",
    )
    missing = [
        name
        for name in links + names
        if name
        and "GPU" not in name  # stands for the name of one
        and not any((each / name).exists() or "*" in name and list(each.glob(name)) for each in folders)
    ]
    assert not missing


def test_the_guide_shows_the_log_as_it_is(caplog, monkeypatch):
    monkeypatch.setattr(registry, "_chosen", {})
    monkeypatch.setattr(registry, "_told", set())
    [shown] = re.findall(r"^    INFO:tilegym_rmsnorm:((?:.+\n)+)", page("guide"), re.MULTILINE)
    with caplog.at_level(logging.INFO, "tilegym_rmsnorm"):
        tilegym_rmsnorm.rms_norm_forward(torch.ones(2, 4), None, backend="auto")
    assert " ".join(shown.split()) in caplog.messages


# Lists that are whole


def test_every_page_is_in_the_navigation():
    def pages_of(entries):
        for entry in entries:
            for value in entry.values():
                yield from pages_of(value) if isinstance(value, list) else (value,)

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(navigation)) == [path.name for path in PAGES]


def test_every_public_name_is_in_the_reference():
    named = script("docs_names").entries(page("api"))
    assert sorted(name for _, name in named) == sorted(tilegym_rmsnorm.__all__)


def test_the_table_of_names_is_of_today():
    assert script("docs_names").table(page("api")) in page("api"), "python scripts/docs_names.py writes it"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_in_the_first_column_of_a_table_fits_the_page(path):
    """The site does not break it (extra.css). Signatures there made a table of 1821 pixels on a page of 720."""
    cells = re.findall(r"^\| ([^|]*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert not [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if len(code) > 66]


def test_the_table_of_calls_is_of_today():
    assert script("docs_variants").table() in page("residual-bias-heads"), (
        "scripts/docs_variants.py writes it"
    )


@pytest.mark.parametrize("form", [Form(residual=True), Form(heads=4), Form(bias=True)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_which_rows_are_fused(op, form):
    """As the table and the points below it have it: to that width, and no column more. Of all widths those near what it
    names, and some of each kind between."""
    near = (range(width - 32, width + 33) for width in (8192, 12288, 16384))
    widths = sorted({*range(1, 20000, 61), *itertools.chain(*near)})
    text = page("residual-bias-heads")
    db = op == "backward" and form.bias
    assert "**Rows that are not aligned**: 8192 in" in text and "rows is float32: 12288 in" in text
    for architecture, (dtype, itemsize) in itertools.product(rules.ARCHITECTURES, ITEMSIZE.items()):
        asked = Problem(op, 0, dtype, dtype, "large", Device(architecture, 132, 16), form=form)
        fused = [asked._replace(n=n) for n in widths if rules.is_fused(asked._replace(n=n))]
        aligned = [
            each.n for each in fused if each.n * itemsize % 16 == 0 and (each.n <= 12288 or each.n % 16 == 0)
        ]
        others = {each.n for each in fused} - set(aligned)
        is_narrow = itemsize == 4 and op != "forward" and architecture != 90
        assert aligned[-1] == (8192 if db else 12288 if is_narrow else 16384)
        assert max(others) == 8191


def test_every_argument_is_described():
    """mkdocs would say so, too; it is not where the tests run."""
    for path in (
        PACKAGE / f"{name}.py"
        for name in (
            "api",
            "passes",
            "module",
            "overriding",
            "patching",
            "policy",
            "registry",
            "warming",
            "integrations/fx",
            "integrations/tilegym",
            "integrations/quack",
            "integrations/liger",
            "integrations/vllm",
            "integrations/apex",
            "integrations/huggingface/mapping",
        )
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and "    Args:" in (
                ast.get_docstring(node, clean=False) or ""
            ):
                given = [*node.args.args, *node.args.kwonlyargs, *filter(None, [node.args.kwarg])]
                arguments = [each.arg for each in given if each.arg not in ("self", "cls")]
                described = re.findall(
                    r"^    \*{0,2}(\w+): ", ast.get_docstring(node).partition("Args:")[2], re.M
                )
                described = [each for each in described if not each.endswith("Error")]
                assert described == arguments, (path.name, node.name)


def test_every_kernel_is_on_its_page():
    kernels = {
        each.kernel for each in vars(variants).values() if is_variant(each) and hasattr(each, "kernel")
    }
    named = set(re.findall(r"`((?:forward|backward|sum|clear)_\w+)`", page("how-it-works")))
    assert named == kernels


def is_variant(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Variant)


# Environment variables


def variables(text: str) -> set[str]:
    """Those that headings and first cells of tables name."""
    places = re.findall(r"^(?:### |\| )([^|\n]*)", text, re.MULTILINE)
    return set(re.findall(r"`([A-Z_]+)`", "".join(places)))


def test_every_variable_of_the_package_has_a_line():
    """And no line is of a variable that nobody reads."""
    ours, _, theirs = page("environment").partition("## Of the benchmark")
    listed = variables(ours)
    read = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"TILEGYM_RMSNORM_[A-Z_]+", text))
        if "environ" in text or "VARIABLE = " in text:
            constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            read |= {
                each for each in constants if isinstance(each, str) and re.fullmatch("[A-Z][A-Z_]{2,}", each)
            }
    assert listed == read - {"GPU"}  # a line of doctor's
    listed |= variables(theirs)
    for path in itertools.chain((ROOT / "bench").glob("*.*"), (ROOT / "scripts").iterdir()):
        if path.is_file():
            names = set(re.findall(r"TILEGYM_RMSNORM_[A-Z_]+", path.read_text(encoding="utf-8")))
            assert names <= listed, path.name
    assert "TILEGYM_RMSNORM_COMMIT" in (ROOT / "bench" / "provenance.py").read_text(encoding="utf-8")


# Promises


def test_every_test_that_holds_a_promise_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page("promises"))
    assert len(named) > 40
    for path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)


# Drawings, and the site


def test_drawings_are_those_of_the_script():
    drawn = script("docs_drawings").drawings()
    assert {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*.svg")} == drawn
    assert set(re.findall(r"\(images/([\w-]+\.svg)\)", page("how-it-works"))) == set(drawn)


def test_drawings_can_be_read_on_a_phone():
    """Of a phone 390 pixels wide the site leaves 358 to a picture."""
    for name, text in script("docs_drawings").drawings().items():
        width = float(re.search(r'viewBox="0 0 (\d+) ', text)[1])
        sizes = [float(each) for each in re.findall(r"(\d+)px", text)]
        assert min(sizes) * 358 / width >= 13, name
        assert "prefers-color-scheme: dark" in text


@pytest.mark.slow  # the job docs builds it for each push
def test_the_site_builds(tmp_path):
    if importlib.util.find_spec("mkdocs") is None and shutil.which("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    command = ["mkdocs"] if shutil.which("mkdocs") else [sys.executable, "-m", "mkdocs"]
    done = subprocess.run(
        [*command, "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for path in PAGES:
        assert (tmp_path / f"{path.stem}.html").exists()


# Contributing


def test_the_shapes_that_contributing_names_run_the_kernels_it_names():
    """In the interpreter, where one steps through them: those of a forward and of a backward that needs dw, and, behind
    "without a gradient of weight", of one that does not."""
    machine = pytest.importorskip("tilegym_rmsnorm.backends.cutile.runtime.machine").InterpretedMachine
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \((\d+), (\d+)\) \| (.*) \|$", text, re.M)
    assert len(rows) > 3
    for m, n, kernels in rows:
        launched = {op: launched_kernels(op, int(m), int(n), machine.facts) for op in OPS}
        with_dw, _, alone = kernels.partition("without a gradient of weight")
        assert (
            named(with_dw) <= launched["forward"] | launched["backward"] and named(alone) <= launched["dx"]
        ), (m, n)


def named(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def launched_kernels(op: str, m: int, n: int, facts: Device) -> set[str]:
    asked = Problem(op, n, "float32", "float32", size_class(m, n), facts)
    plan = select(asked, tables_of(facts.architecture, None, None))
    return {
        step.kernel for step, grid in zip(plan.steps, plan.sizes(m).grids, strict=True) if grid is not None
    }
