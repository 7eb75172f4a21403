# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Pages: examples run, names are of things that exist, lists are whole, tables and drawings are of today."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import logging
import re
import socket
from pathlib import Path

import pytest
import torch

import tilegym_rmsnorm
from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.cutile.plans import rope, variants
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant

ROOT = Path(__file__).resolve().parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "tilegym_rmsnorm"
PAGES = sorted(DOCS.glob("*.md"))
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "bench/NOTES.md", "bench/README.md")]
OTHERS += sorted((ROOT / "bench" / "results").glob("*/*.md"))
# What examples need in which these names stand.
LIBRARIES = {"transformers": ["transformers"], "onnx": ["onnx", "onnxscript", "onnxruntime"]}
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
    """Restore what examples change: the norm of transformers' Llama, compiled code and logging."""
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
        for library in re.findall(r"\b(transformers|onnx)\b", match[1]):
            for needed in LIBRARIES[library]:
                pytest.importorskip(needed, reason=f"{needed} is not installed")
        source = "\n" * text.count("\n", 0, match.start(1)) + match[1]
        exec(compile(source, str(path), "exec"), names)
    examples = doctest.DocTestParser().get_doctest(text.replace("```", ""), names, path.name, str(path), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not runner.run(examples).failed


@pytest.mark.parametrize("path", [*PAGES, *OTHERS], ids=lambda path: path.stem)
def test_paths_that_a_page_names_exist(path):
    """Links, and names of files and folders in `code`, from the page, the root, the package, or tests/."""
    text = path.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    names = re.findall(r"`([\w./*-]+(?:\.py|\.json|\.txt|\.md|\.sh|/))`", text)
    cutile = PACKAGE / "backends" / "cutile"
    folders = (path.parent, ROOT, PACKAGE, cutile, PACKAGE / "measure", ROOT / "tests", ROOT / "scripts")
    missing = [
        name
        for name in links + names
        if name
        and not re.search("GPU|OP", name)  # stand for the name of one
        and not any((each / name).exists() or "*" in name and list(each.glob(name)) for each in folders)
    ]
    assert not missing


def test_every_public_name_is_in_the_reference():
    assert sorted(script("docs_names").names(page("api"))) == sorted(tilegym_rmsnorm.__all__)


def test_every_argument_is_described():
    """Entries of the reference name all, but for classes that users never construct."""
    for module, name in script("docs_names").ENTRY.findall(page("api")):
        public = getattr(importlib.import_module(module), name)
        if name not in ("BackendUnavailableError", "Override"):
            lines = inspect.getdoc(public).partition("Args:")[2].partition("\n\n")[0]
            assert re.findall(r"^    \*{0,2}(\w+): ", lines, re.M) == [
                *inspect.signature(public).parameters
            ], name


def test_tables_and_drawings_are_of_today():
    assert script("docs_names").table(page("api")) in page("api"), "scripts/docs_names.py writes it"
    table = script("docs_variants").table()
    assert table in page("residual-bias-heads"), "scripts/docs_variants.py writes it"
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "images").glob("*.svg")}
    assert drawn == script("docs_drawings").drawings(), "scripts/docs_drawings.py draws them"


def test_every_kernel_is_on_its_page():
    settings = (vars(variants) | vars(rope)).values()
    found = (each for each in settings if isinstance(each, type) and issubclass(each, Variant))
    kernels = {each.kernel for each in found if hasattr(each, "kernel")}
    named = set(re.findall(r"`((?:forward|backward|sum|clear)_\w+)`", page("how-it-works")))
    assert named == kernels


def test_every_environment_variable_has_a_line():
    """And no line is of a variable that nobody reads."""
    places = re.findall(r"^(?:### |\| )([^|\n]*)", page("environment"), re.MULTILINE)
    listed = set(re.findall(r"`([A-Z_]+)`", "".join(places)))
    paths = (path for name in ("tilegym_rmsnorm", "bench", "scripts") for path in (ROOT / name).rglob("*.*"))
    source = "".join(path.read_text(encoding="utf-8") for path in paths if path.suffix in (".py", ".sh"))
    assert set(re.findall(r"TILEGYM_RMSNORM_[A-Z_]+", source)) <= listed
    assert not [name for name in listed if not re.search(rf"\b{name}\b", source)]
    assert set(re.findall(r"TILEGYM_RMSNORM_[A-Z_]+", source)) == set(settings.VARIABLES)


def test_every_test_that_holds_a_promise_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page("promises"))
    assert len(named) > 40
    for path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
