# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Pages: examples run, names are of things that exist, lists are whole, tables and drawings are of today. README.md's
commands exist, and its sentences say what its tables do; docs/troubleshooting.md quotes messages that exist."""

import ast
import doctest
import importlib
import importlib.util
import inspect
import logging
import os
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
LIBRARIES = {
    "Trainer": ["accelerate"],
    "lightning": ["lightning"],
    "megatron": ["megatron.core"],
    "onnx": ["onnx", "onnxscript", "onnxruntime"],
    "transformers": ["transformers"],
}
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
        for library in re.findall(rf"\b({'|'.join(LIBRARIES)})\b", match[1]):
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
        if name not in ("BackendUnavailableError", "NormConverter", "Override"):
            docstring, parameters = described(module, name)
            lines = docstring.partition("Args:")[2].partition("\n\n")[0]
            assert re.findall(r"^    \*{0,2}(\w+): ", lines, re.M) == parameters, name


def described(module: str, name: str) -> tuple[str, list[str]]:
    """The docstring and the parameters of what a module has by this name."""
    if ".torchtitan" not in module:
        public = getattr(importlib.import_module(module), name)
        return inspect.getdoc(public), [*inspect.signature(public).parameters]
    # Those modules import two releases of a library, which may be missing.
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    (function,) = (each for each in tree.body if getattr(each, "name", None) == name)
    return ast.get_docstring(function), [each.arg for each in function.args.args]


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


HOLE = "…"  # stands for a value in a message


def template(node: ast.AST | None) -> str | None:
    """The text that an expression gives, with holes where values come in; None where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(template(each) or HOLE for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (template(node.left) or HOLE) + (template(node.right) or HOLE)
    return None


def fragments() -> list[str]:
    """Quotes: the code in front of the colon of each point. "expected" is put in front of many by one function."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    points = re.findall(r"^- ((?:`[^`]+`(?:,\s+)?)+):\s", text, re.MULTILINE)
    quoted = [each for point in points for each in re.findall(r"`([^`]+)`", point)]
    return [" ".join(each.split()).removeprefix("expected ") for each in quoted]


def test_every_quoted_message_is_in_the_source():
    paths = (ROOT / "tilegym_rmsnorm").rglob("*.py")
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    found = list(filter(None, map(template, nodes)))
    patterns = {
        each: re.compile(".*".join(map(re.escape, each.split(HOLE))), re.DOTALL) for each in fragments()
    }
    assert len(patterns) > 80
    assert not [each for each, pattern in patterns.items() if not any(map(pattern.search, found))]


TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_figures_in_sentences_are_those_of_the_tables():
    """bench/report/readme.py writes the tables."""
    (level,) = re.findall(r"^\| NVIDIA H100.*, bfloat16 .*\| +(\d+) of 29 \|$", TEXT, re.MULTILINE)
    assert f"({29 - int(level)} of 29 on an H100)" in TEXT


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


def test_pytorch_for_a_gpu_is_the_one_of_the_figures():
    """pip by itself would bring the newest."""
    measured = re.search(r"^Measured .* torch ([\d.]+)\+cu\d+, triton ([\d.]+),", TEXT, re.MULTILINE)
    pytorch, triton = measured.groups()
    limits, index = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("limits.md", "index.md"))
    for page in (TEXT, limits, index):
        assert f'pip install "torch=={pytorch}" -e ".[cutile]"' in page
    assert f"PyTorch {pytorch}, with the Triton {triton} that it brings" in TEXT
    assert f"{pytorch} and its\n  Triton {triton}" in limits
