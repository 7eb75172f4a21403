# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Triton's and cuTile's kernels run in their interpreters, on CPU tensors, where there is no CUDA device."""

import functools
import gc
import os
import sys
import types
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "Triton reads TRITON_INTERPRET when it is imported"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TILEGYM_RMSNORM_INTERPRET", "1")

import helpers
import table_cases
from helpers import BACKENDS, HAS_GPU, settle_interpreters, why_lacked, why_skip
from processes import mesh_of_one

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends import around_kernels
from tilegym_rmsnorm.backends.cutile.runtime import tables, toolchain
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE
from tilegym_rmsnorm.ops.norm import checks as norm_checks
from tilegym_rmsnorm.reproducibility import REPRODUCIBLE_VARIABLE, set_reproducible
from tilegym_rmsnorm.routes import known_calls, main_grad
from tilegym_rmsnorm.settings import SM_MARGIN_VARIABLE, TEAMS_VARIABLE

pytest_plugins = ("aten_cases", "gate_cases", "traced_norms")  # their fixtures are asked for in several files

# What the tests of each folder are: their markers, which pyproject.toml explains. The folders stand in the order in
# which they run, those of the longest tests first.
FOLDERS: dict[str, tuple[str, ...]] = {
    "machine_code": ("slow", "no_gpu"),
    "compiled": ("slow",),
    "processes": ("slow",),
    "examples": ("slow",),
    "bench": ("slow",),
    "distributed": ("slow",),
    "kernels": ("slow", "no_gpu"),
    "tuning": ("slow",),
    "backends": ("slow",),
    "gpu": ("slow", "gpu"),
    "gpu/in_parts": ("slow", "gpu"),
    "runtime": ("no_gpu",),
    "commands": (),
    "integrations": (),
    "integrations/huggingface": (),
    "api": (),
    "interpreter": ("no_gpu",),
    "plans": ("no_gpu",),
    "project": (),
}
ORDER = {folder: number for number, folder in enumerate(FOLDERS)}
# Libraries without which no file of a folder is imported, but for those named here.
NEEDS = {"machine_code": "cuda.tile", "kernels": "cuda.tile", "tuning": "cuda.tile"}
NEEDS |= {"integrations/huggingface": "transformers"}
NEED_NONE = ("test_candidates.py", "test_forward_expressions.py")
TESTS = Path(__file__).parent
# pytest put it there for this file. Each of its folders would pass for a library: `import kernels` found tests/kernels.
sys.path[:] = [folder for folder in sys.path if folder != str(TESTS)]


@functools.cache
def folder_of(path: str | os.PathLike[str]) -> str:
    """The folder of a test file, as FOLDERS has it."""
    folder = Path(path).parent.relative_to(TESTS).as_posix()
    if folder not in FOLDERS:
        raise pytest.UsageError(f"tests/{folder}: FOLDERS in tests/conftest.py needs a line for this folder")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-config",
        action="store_true",
        help="compile every rule of Hopper and every entry, and more of the others, in place of a sample",
    )


def pytest_configure(config: pytest.Config) -> None:
    helpers.every_config = config.getoption("--every-config")
    helpers.stderr = os.dup(2)  # pytest captures none of what plugins do here


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast job does not import the others' modules, nor they those of its own that mark no test slow: each takes
    half a minute."""
    if TESTS not in collection_path.parents:
        return None
    if config.option.markexpr == "not slow" and collection_path.is_dir():
        return "slow" in FOLDERS.get(collection_path.relative_to(TESTS).as_posix(), ()) or None
    if (
        config.option.markexpr == "slow"
        and collection_path.name.startswith("test_")
        and "slow" not in FOLDERS[folder_of(collection_path)]
    ):
        return "mark.slow" not in collection_path.read_text(encoding="utf-8") or None
    return None


class Needing(pytest.Module):
    """A test file that is skipped, with this reason, where its folder's library is not installed."""

    def collect(self):
        pytest.importorskip(library := NEEDS[folder_of(self.path)], reason=f"{library} is not installed")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if folder_of(module_path) not in NEEDS or module_path.name in NEED_NONE:
        return None
    return Needing.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)  # -m asks for the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in FOLDERS[folder_of(item.path)]:
            item.add_marker(name)
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: ORDER[folder_of(item.path)])
    if HAS_GPU and "PYTEST_XDIST_WORKER" in os.environ:
        spread(items, [item for item in items if item.get_closest_marker("much_memory")])


def spread(items: list[pytest.Item], some: list[pytest.Item]) -> None:
    """Put some of the items far apart: side by side they go to several processes, which then wait for each other."""
    others = [item for item in items if item not in some]
    for number, item in enumerate(some):
        others.insert(number * len(items) // len(some), item)
    items[:] = others


@pytest.fixture(autouse=True)
def share_of_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A test that is marked `alone` has the GPU to itself: until it ends, no test in another process begins. Of those
    that are marked `much_memory` one runs at a time."""
    needs_none = not HAS_GPU or request.node.get_closest_marker("no_gpu")
    if needs_none or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    import fcntl  # not on Windows

    folder = tmp_path_factory.getbasetemp().parent
    with (
        open(folder / "memory", "w") as memory,
        open(folder / "door", "w") as door,
        open(folder / "room", "w") as room,
    ):
        if request.node.get_closest_marker("much_memory"):
            fcntl.flock(memory, fcntl.LOCK_EX)  # waits in front of the open door
        fcntl.flock(door, fcntl.LOCK_EX)
        if request.node.get_closest_marker("alone"):
            fcntl.flock(room, fcntl.LOCK_EX)  # waits with the door closed, so that the room empties
        else:
            fcntl.flock(room, fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing it would not, if a test had forked
            if torch.cuda.memory_reserved() > 2**29:
                torch.cuda.empty_cache()  # other processes need it now
            fcntl.flock(memory, fcntl.LOCK_UN)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name; one that cannot run here is skipped with its reason."""
    reason = why_skip(request.param) or why_lacked(request.param, request)
    if reason is not None:
        pytest.skip(reason)
    return request.param


@pytest.fixture(autouse=True)
def default_selection(share_of_the_gpu, monkeypatch: pytest.MonkeyPatch):
    """No test inherits, or leaves behind, a choice of the process, and none sees what was tuned on this machine.

    share_of_the_gpu comes first, and so ends when nothing is patched any more.
    """
    for variable in (settings.BACKEND_VARIABLE, TEAMS_VARIABLE, SM_MARGIN_VARIABLE, REPRODUCIBLE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    forget_choices()
    yield
    forget_choices()


def forget_choices() -> None:
    settings.set_backend(None)
    settings.set_teams(None)
    settings.set_sm_margin(None)
    set_reproducible(None)
    known_calls.forget()


@pytest.fixture
def marks_end():
    """Calls of later tests look at no weight again."""
    yield
    main_grad.IN_USE.clear()


@pytest.fixture
def mesh():
    """A mesh of one CPU process."""
    with mesh_of_one() as mesh:
        yield mesh


@pytest.fixture
def fresh_dynamo():
    """Nothing is compiled yet, and random numbers are the same in each run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list:
    """Each input of rms_norm that went through all checks."""
    seen = []
    check_input = norm_checks.check_input

    def counted(name, x, **options):
        seen.append(x)
        check_input(name, x, **options)

    monkeypatch.setattr(norm_checks, "check_input", counted)
    return seen


@pytest.fixture
def known_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run cutile's kernels in the interpreter without a GPU: its calls become known too."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    if not HAS_GPU:
        monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
        settle_interpreters(monkeypatch)
    known_calls.forget()


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialized memory holds NaN (integers: their largest value), so that reading it cannot look right."""

    def poison(create):
        def create_poisoned(*args, **kwargs):
            tensor = create(*args, **kwargs)
            with torch.no_grad():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(float("nan"))
                elif tensor.dtype != torch.bool:
                    tensor.fill_(torch.iinfo(tensor.dtype).max)
            return tensor

        return create_poisoned

    allocators = [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]
    if HAS_GPU and why_skip("cutile") is None:
        from tilegym_rmsnorm.backends.cutile.runtime.machine import GpuMachine

        allocators.append((GpuMachine, "empty"))
    for owner, name in allocators:
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.fixture
def no_composing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where PyTorch's operations do a part of a cutile call."""

    def fail(*_):
        raise AssertionError("composed of PyTorch's operations")

    monkeypatch.setattr(around_kernels, "forward", fail)
    monkeypatch.setattr(around_kernels, "backward", fail)


@pytest.fixture
def fresh_plans():
    """cuTile's launchers are made anew in this test, and again after it."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from tilegym_rmsnorm.backends.cutile.host import launcher, rope

    caches = launcher.launcher_of, rope._sum_of
    [made.cache_clear() for made in caches]
    yield
    [made.cache_clear() for made in caches]


@pytest.fixture(params=[False, True], ids=["by checks", "known"])
def launches(monkeypatch: pytest.MonkeyPatch, fresh_plans, request: pytest.FixtureRequest):
    """Record the interpreter's kernels: `bound`, by name, and `grids`, the blocks of each that ran last. Launchers are
    made anew."""
    if HAS_GPU:
        pytest.skip("the interpreter is for machines without a GPU")
    if request.param:
        settle_interpreters(monkeypatch)
    from tilegym_rmsnorm.backends.cutile.runtime.machine import InterpretedMachine

    found, bind = types.SimpleNamespace(bound=[], grids={}), InterpretedMachine.bind

    def noting(self, function, *rest):
        found.bound.append(function.__name__)
        run = bind(self, function, *rest)

        def launched(grid, arguments):
            found.grids[function.__name__] = grid[0]
            run(grid, arguments)

        return launched

    monkeypatch.setattr(InterpretedMachine, "bind", noting)
    return found


@pytest.fixture
def quick_gc():
    """gc.collect() looks through what this test makes: with all that others left behind it takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, fresh_plans) -> list[str]:
    """The names of the kernels that cuda-tile's JIT compiles or takes from its disk cache, those that another test has
    compiled too."""
    if reason := why_skip("cutile"):
        pytest.skip(reason)
    import cuda.tile as ct

    from tilegym_rmsnorm.backends.cutile.runtime import machine

    names: list[str] = []
    compile_kernel = ct.kernel._compile

    def counted(self, *args, **kwargs):
        names.append(self._pyfunc.__name__)
        return compile_kernel(self, *args, **kwargs)

    monkeypatch.setattr(ct.kernel, "_compile", counted)
    monkeypatch.setattr(machine, "compiled", functools.cache(machine.compiled.__wrapped__))
    return names


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Empty folders for the user's tables and for what ships, where the rules of table_cases.TARGET's architecture are,
    and the toolkit that this target names."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "user"))
    table_cases.copy_rules(tmp_path / "shipped")
    monkeypatch.setattr(tables, "SHIPPED_FOLDER", tmp_path / "shipped")
    found = toolchain.Tileiras("tileiras", "PATH", (13, 4, 92), inherits_cuda_home=True)
    monkeypatch.setattr(toolchain, "find_tileiras", lambda: found)
    monkeypatch.setattr(toolchain, "package_version", lambda name: "1.7.0")
    table_cases.forget_files()
    yield tmp_path / "user", tmp_path / "shipped"
    table_cases.forget_files()


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch):
    """A search over the interpreter, at sizes that it can run."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from tilegym_rmsnorm.backends.cutile.plans import sizes
    from tilegym_rmsnorm.backends.cutile.runtime import machine
    from tilegym_rmsnorm.backends.cutile.tuning import search

    tables.shipped_records(90)  # now: entries that ship are checked against the true size classes
    monkeypatch.setattr(sizes, "FEW_ROWS", 8)
    monkeypatch.setattr(sizes, "SMALL", 40 * 64)
    monkeypatch.setattr(search, "LARGE", (2 * 48 * 64,))
    monkeypatch.setattr(search, "RUNS", 16)
    monkeypatch.setattr(search, "calls_needed", lambda *_: 1)
    lines = []
    found = search.Search(machine.InterpretedMachine(), torch.device("cpu"), lines.append)
    found.lines = lines
    return found
