# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cutile backend's findings on a machine, and its messages where something is missing."""

import importlib.metadata
from pathlib import Path

import pytest
import torch

from tilegym_rmsnorm.backends import cutile
from tilegym_rmsnorm.backends.cutile.runtime import toolchain
from tilegym_rmsnorm.backends.registry import Request
from tilegym_rmsnorm.commands import installation
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32
COMPILERS = dict.fromkeys(toolchain.PIP_PACKAGES, "13.4.92")
ALL_PACKAGES = {"cuda-tile": "1.7.0", **COMPILERS, "nvidia-cuda-crt": "13.4.92"}


@pytest.fixture(autouse=True)
def fresh_answers(monkeypatch: pytest.MonkeyPatch):
    """No cached answer, no CUDA variable and no interpreter from outside a test, or from it to the next."""
    for name in (
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_TILE_CACHE_DIR",
        "XDG_CACHE_HOME",
        cutile.INTERPRET_VARIABLE,
    ):
        monkeypatch.delenv(name, raising=False)

    def clear():
        for module in (toolchain, cutile):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    clear()
    yield
    clear()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch):
    """Call it with {name: version} to have exactly these of the packages that the backend asks for."""
    real = importlib.metadata.version

    def have(installed: dict[str, str]) -> None:
        def version(name: str) -> str:
            if name not in ALL_PACKAGES:
                return real(name)
            if name not in installed:
                raise importlib.metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return have


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Call it with a compute capability to have one GPU of it, with a new driver."""

    def have(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (13, 0))

    return have


def make_toolkit(folder: Path, version: str, *programs: str) -> Path:
    """A folder whose bin holds programs that only know their version."""
    (folder / "bin").mkdir(parents=True)
    release = ".".join(version.split(".")[:2])
    for name in programs:
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{version}'\n")
        program.chmod(0o755)
    return folder


def request(device=GPU, dtype=BF16, weight_dtype=BF16, other_dtypes=()) -> Request:
    return Request(device, dtype, weight_dtype, "once", other_dtypes)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages):
    """Call it with the places that hold a tileiras, of "pip package", "PATH" and "CUDA_HOME"."""

    def have(*names: str) -> None:
        packages(COMPILERS if "pip package" in names else {})
        pip = make_toolkit(tmp_path / "site" / "nvidia" / "cu13", "13.4.92", "tileiras")
        monkeypatch.syspath_prepend(str(pip.parents[1]))
        path = make_toolkit(tmp_path / "path", "13.4.1", *(["tileiras"] if "PATH" in names else []))
        monkeypatch.setenv("PATH", str(path / "bin"))
        home = make_toolkit(
            tmp_path / "home", "13.5.7", "ptxas", *(["tileiras"] if "CUDA_HOME" in names else [])
        )
        monkeypatch.setenv("CUDA_HOME", str(home))
        monkeypatch.setattr(toolchain, "_default_toolkits", lambda: [])

    return have


@pytest.mark.parametrize(
    ("found_in", "source", "release"),
    [
        (("pip package", "PATH", "CUDA_HOME"), "pip package", (13, 4, 92)),
        (("PATH", "CUDA_HOME"), "PATH", (13, 4, 1)),
        (("CUDA_HOME",), "CUDA_HOME", (13, 5, 7)),
    ],
)
def test_tileiras_is_searched_in_the_order_of_cuda_tile(places, found_in, source, release):
    places(*found_in)

    found = toolchain.find_tileiras()

    assert (found.source, found.release) == (source, release)
    # The search is written again from this private function: a cuda-tile that changes it must be noticed here.
    theirs = pytest.importorskip("cuda.tile._compile")
    theirs._find_compiler_bin.cache_clear()
    binary = theirs._find_compiler_bin()
    theirs._find_compiler_bin.cache_clear()
    assert (found.path, found.inherits_cuda_home) == (binary.path, binary.pass_cuda_home_var)


def test_no_tileiras_anywhere(places, packages, gpu):
    places()
    gpu(9, 0)
    packages({"cuda-tile": "1.7.0"})

    assert toolchain.find_tileiras() is None
    assert cutile.unusable(request()) == ("tileiras is not installed", toolchain.PIP_INSTALL)


def test_pip_packages_of_different_versions_are_named(places, packages, gpu):
    places()
    gpu(9, 0)
    packages(ALL_PACKAGES | {"nvidia-nvvm": "13.3.73"})

    reason, remedy = cutile.unusable(request())

    assert "nvidia-cuda-tileiras 13.4.92" in reason and "nvidia-nvvm 13.3.73" in reason
    assert remedy == toolchain.PIP_INSTALL


def test_patch_versions_may_differ(packages):
    packages(COMPILERS | {"nvidia-nvvm": "13.4.49"})
    assert toolchain.pip_mismatch() is None


def test_headers_of_another_version_leave_the_compiler_found(places, packages):
    """pip takes the newest headers for nvcc, unless a command names their version too."""
    places("pip package")
    packages(ALL_PACKAGES | {"nvidia-cuda-crt": "13.5.37"})

    assert toolchain.find_tileiras().source == "pip package"
    line = installation.describe()["tileiras"]
    assert "nvidia-cuda-nvcc 13.4.92" in line and "nvidia-cuda-crt 13.5.37" in line
    assert '"nvidia-cuda-crt==13.4.*"' in line


@pytest.mark.parametrize("installed", [ALL_PACKAGES, COMPILERS])
def test_headers_of_its_version_or_none_are_not_named(places, packages, installed):
    places("pip package")
    packages(installed)

    assert "nvidia-" not in installation.describe()["tileiras"]


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize(
    ("version", "programs", "conflict"),
    [
        ("13.0.88", ["ptxas"], "is CUDA 13.0.88, older than tileiras 13.4.1"),
        ("13.4.92", [], "holds no ptxas"),
        ("13.4.0", ["ptxas"], None),
        ("13.5.37", ["ptxas"], None),
    ],
)
def test_cuda_home_conflicts(places, tmp_path, monkeypatch, variable, version, programs, conflict):
    places("PATH")
    other = make_toolkit(tmp_path / "other", version, *programs)
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv(variable, str(other))

    found = toolchain.cuda_home_conflict()

    assert found is None if conflict is None else f"{variable}={other}" in found and conflict in found


def test_cuda_home_cannot_disturb_the_pip_package(places, tmp_path, monkeypatch):
    places("pip package")
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "old", "12.4.1", "ptxas")))

    assert toolchain.cuda_home_conflict() is None


def test_conflict_makes_the_backend_unusable(places, packages, gpu, tmp_path, monkeypatch):
    places("PATH")
    gpu(9, 0)
    packages({"cuda-tile": "1.7.0"})
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "old", "12.4.1", "ptxas")))

    reason, remedy = cutile.unusable(request())

    assert "older than tileiras" in reason
    assert remedy.startswith("unset CUDA_HOME")


@pytest.mark.parametrize(
    ("value", "folder"),
    [("off", None), ("0", None), (" None ", None), ("", None), ("no", Path("no")), ("/k", Path("/k"))],
)
def test_cache_folder_from_the_variable(monkeypatch, value, folder):
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", value)

    assert toolchain.cache_folder() == folder
    theirs = pytest.importorskip("cutile_cache._env")
    assert theirs.get_cache_dir_from_env() == (folder and str(folder))


def test_default_cache_folder_is_that_of_cuda_tile():
    theirs = pytest.importorskip("cutile_cache._env")
    assert str(toolchain.cache_folder()) == theirs.get_cache_dir_from_env()


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_supported_architectures(places, packages, gpu, capability):
    places("pip package")
    packages(ALL_PACKAGES)
    gpu(*capability)

    assert cutile.unusable(None) is None
    assert cutile.unusable(request()) is None


@pytest.mark.parametrize("level", [BATCH, BATCH | DEVICE])
@pytest.mark.parametrize(
    ("capability", "found_in", "release"),
    [
        *(
            ((9, 0), place, release)
            for place, release in (("pip package", "13.4.92"), ("CUDA_HOME", "13.5.7"))
        ),
        *((each, "pip package", "13.4.92") for each in ((8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0))),
    ],
)
def test_levels_are_kept_where_the_order_of_sums_was_compared(
    places, packages, gpu, capability, found_in, release, level
):
    places(found_in)
    packages(ALL_PACKAGES if found_in == "pip package" else {"cuda-tile": ALL_PACKAGES["cuda-tile"]})
    gpu(*capability)
    asked, problem = request(), cutile.unusable(request()._replace(reproducible=level))

    assert cutile.unusable(asked) is None
    if capability == (9, 0) and release == "13.4.92":
        assert problem is None
    else:
        assert problem.reason.startswith(
            "the order of its sums was compared on sm_90 with tileiras 13.4 alone"
        )
        assert problem.reason.endswith(f"is sm_{''.join(map(str, capability))}, tileiras {release}")
        assert problem.remedy == 'use backend="triton"'


def test_unsupported_architecture(gpu):
    gpu(7, 5)

    reason, remedy = cutile.unusable(request())

    assert "sm_75" in reason and "sm_90" in reason
    assert 'backend="triton"' in remedy


def test_old_driver(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(toolchain, "driver_cuda_version", lambda: (12, 8))

    assert "CUDA 12.8" in cutile.unusable(None).reason
    assert "r580" in cutile.unusable(request()).remedy


@pytest.mark.parametrize("version", [None, "1.6.2", "0.9", "2.0.0"])
def test_missing_or_other_cuda_tile(packages, gpu, version):
    gpu(9, 0)
    packages(COMPILERS | ({"cuda-tile": version} if version else {}))

    reason, remedy = cutile.unusable(request())

    assert reason.startswith(f"cuda-tile {version}" if version else "cuda-tile is not installed")
    assert remedy == 'pip install "cuda-tile>=1.7,<1.8"'


@pytest.mark.parametrize("version", ["1.7.0", "1.7.3.post1", "1.8.0", "1.12.0"])
def test_a_later_cuda_tile_runs(places, packages, gpu, version):
    """doctor says which of them are not tested."""
    places("pip package")
    packages(ALL_PACKAGES | {"cuda-tile": version})
    gpu(9, 0)

    assert cutile.unusable(request()) is None


def test_old_tileiras(places, packages, gpu, tmp_path, monkeypatch):
    places()
    packages({"cuda-tile": "1.7.0"})
    gpu(9, 0)
    old = make_toolkit(tmp_path / "old", "13.2.78", "tileiras", "ptxas")
    monkeypatch.setenv("CUDA_HOME", str(old))

    reason, remedy = cutile.unusable(request())

    assert "tileiras 13.2.78 (from CUDA_HOME" in reason
    assert remedy == toolchain.PIP_INSTALL


def test_cpu_tensors_run_in_the_interpreter_only(packages, monkeypatch):
    packages({"cuda-tile": "1.7.0"})
    reason, remedy = cutile.unusable(request(CPU))
    assert "cpu" in reason and "TILEGYM_RMSNORM_INTERPRET=1" in remedy

    monkeypatch.setenv("TILEGYM_RMSNORM_INTERPRET", "1")
    assert cutile.unusable(request(CPU)) is None  # no tileiras, no GPU


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_without_a_gpu_moving_cpu_tensors_is_no_remedy(packages, monkeypatch, cuda):
    """A build of PyTorch without CUDA beside a GPU: only another build helps."""
    packages(ALL_PACKAGES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    here, of_tensors = cutile.unusable(None), cutile.unusable(request(CPU))
    assert of_tensors.reason == "it runs on CUDA tensors, these are on cpu"
    mends = "check nvidia-smi" if cuda else "install a CUDA build of PyTorch, as https://pytorch.org/"
    assert here.remedy.startswith(mends) and of_tensors.remedy.startswith(mends)
    assert f" ({here.reason}), or " in of_tensors.remedy


def test_beside_a_gpu_cpu_tensors_are_moved(packages, gpu):
    packages(ALL_PACKAGES)
    gpu(9, 0)
    assert cutile.unusable(request(CPU)).remedy.startswith("move the tensors to an NVIDIA GPU, or ")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (request(dtype=torch.float64, weight_dtype=torch.float64), ("takes x of", "not torch.float64")),
        (request(weight_dtype=torch.float64), ("takes a weight of", "not torch.float64")),
        (
            request(other_dtypes=(torch.float64,)),
            ("takes bias, residual, gradients and results of", "not torch.float64"),
        ),
    ],
)
def test_tensors_that_the_kernels_do_not_take(places, packages, gpu, asked, named):
    places("pip package")
    packages(ALL_PACKAGES)
    gpu(9, 0)

    reason, remedy = cutile.unusable(asked)

    assert all(each in reason for each in named)
    assert remedy == 'use backend="torch" or "auto"'


@pytest.mark.parametrize("weight_dtype", [None, BF16, torch.float16, FP32])
def test_dtypes_that_the_kernels_take(places, packages, gpu, weight_dtype):
    places("pip package")
    packages(ALL_PACKAGES)
    gpu(9, 0)

    assert cutile.unusable(request(weight_dtype=weight_dtype, other_dtypes=(torch.float16, FP32))) is None
