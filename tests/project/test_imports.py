# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Which module may import which: downwards, and never in a circle. Tests find libraries alone by a library's name."""

import ast
import graphlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tilegym_rmsnorm"
CUTILE = f"{PACKAGE}.backends.cutile"
OPS = sorted(path.name for path in (ROOT / PACKAGE / "ops").iterdir() if (path / "spec.py").exists())
# From below: a module may import those of its own line and of the lines above. The first line that a name begins with.
LAYERS = (
    (f"{PACKAGE}.call.spec", f"{PACKAGE}.call.watched"),
    (f"{PACKAGE}.call.tensors", f"{PACKAGE}.call.arithmetic", f"{PACKAGE}.call.layout"),
    (f"{PACKAGE}.call.validation",),
    (f"{PACKAGE}.call", f"{PACKAGE}.settings", f"{PACKAGE}.scopes", f"{PACKAGE}.reproducibility"),
    # an op's records, checks and formula; its other files are above the routes
    tuple(f"{PACKAGE}.ops.{op}.{each}" for op in OPS for each in ("spec", "checks", "reference", "sharding")),
    (f"{PACKAGE}.backends.contract", f"{PACKAGE}.measure"),
    # knows the backends by the names of their modules, which it imports when they are first asked for
    (f"{PACKAGE}.backends.registry",),
    (f"{CUTILE}.plans",),
    (f"{CUTILE}.kernels",),
    (f"{CUTILE}.interpreter",),
    (f"{PACKAGE}.backends.versions", f"{PACKAGE}.backends.refusals", f"{CUTILE}.runtime"),
    (f"{PACKAGE}.backends.torch_reference",),
    (f"{PACKAGE}.backends.around_kernels", f"{PACKAGE}.backends.around_rope"),
    (f"{CUTILE}.host.launcher",),
    (f"{CUTILE}.host.arrange",),
    (f"{CUTILE}.host.arrange_rope", *(f"{CUTILE}.host.{op}" for op in OPS)),
    (f"{CUTILE}.launch",),
    (f"{CUTILE}.host", f"{CUTILE}.tuning"),
    (f"{PACKAGE}.backends",),
    # It decides and runs nothing: no route is below it.
    (f"{PACKAGE}.routes.choose",),
    (f"{PACKAGE}.routes",),
    tuple(f"{PACKAGE}.ops.{op}.{each}" for op in OPS for each in ("operations", "passes", "eager")),
    tuple(f"{PACKAGE}.ops.{op}.op" for op in OPS),
    (f"{PACKAGE}.ops",),
    (f"{PACKAGE}.functional", *(f"{PACKAGE}.{op}" for op in OPS)),
    (f"{PACKAGE}.nn",),
    # Its own file has public functions, which import an integration when they are called.
    (f"{PACKAGE}.integrations",),
    (PACKAGE,),
)
# Packages of the cutile backend that import nothing of it but themselves and these, and of others only these.
ALONE = {f"{CUTILE}.plans": set(), f"{CUTILE}.kernels": {"cuda"}, f"{CUTILE}.interpreter": {"cuda", "torch"}}


def modules(package: str = PACKAGE) -> dict[str, Path]:
    folder = ROOT / package
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(folder.rglob("*.py"))
        if "results" not in path.parts
    }


def imports(module: str, path: Path, known: dict[str, Path], lazy: bool = True) -> Iterator[str]:
    """The modules that one imports, by their full names. lazy: inside functions too, not only when it is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_package = path.name == "__init__.py"
    for node in ast.walk(tree) if lazy else _at_import(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            for name in node.names:
                full = f"{base}.{name.name}"
                yield full if full in known else base


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield node
            yield from _at_import(node)


def layer_of(module: str) -> int:
    exact = [
        number for number, names in enumerate(LAYERS) if any(f"{module}.".startswith(f"{n}.") for n in names)
    ]
    return exact[0]


@pytest.mark.parametrize("package", [PACKAGE, "bench"])
def test_no_circle_of_imports(package):
    """Nor one that an import inside a function hides."""
    known = modules(package)
    graph = {
        module: {name for name in imports(module, path, known) if name in known and name != module}
        for module, path in known.items()
    }
    graph[package] = set()  # the package itself gathers the public names, and stands above all of its modules
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_import_upwards():
    known = modules()
    upwards = [
        f"{module} imports {name}"
        for module, path in known.items()
        for name in imports(module, path, known)
        if name in known and name != PACKAGE and layer_of(name) > layer_of(module)
    ]
    assert not upwards


@pytest.mark.parametrize("package", ALONE)
def test_parts_of_the_cutile_backend_that_stand_alone(package):
    """plans/ runs where neither torch nor cuda-tile is; kernels/ never choose; interpreter/ knows no kernel of ours."""
    known, builtin = modules(), __import__("sys").stdlib_module_names
    foreign = {
        name
        for module, path in known.items()
        if f"{module}.".startswith(f"{package}.")
        for name in imports(module, path, known)
        if not f"{name}.".startswith(f"{package}.")
        and name.partition(".")[0] not in {*builtin, *ALONE[package]}
    }
    assert not foreign


def test_no_folder_of_tests_passes_for_a_library():
    """`pytest.importorskip("kernels")` found tests/kernels where the library is not installed."""
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name.isidentifier()]
    specs = {folder: importlib.util.find_spec(folder.name) for folder in folders}
    assert len(specs) > 10
    assert not [
        path for path, spec in specs.items() if spec and str(path) in (spec.submodule_search_locations or ())
    ]
