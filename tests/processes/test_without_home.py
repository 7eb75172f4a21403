# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""A machine that knows no home folder: the caches there count as off, with one warning each, and nothing raises."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from planning import by_rules
from table_cases import chosen, rule

from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime import user_folder as runtime_folder
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE, user_folder
from tilegym_rmsnorm.commands import installation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def told_nothing_yet():
    runtime_folder._warn_homeless.cache_clear()
    tables.table_in.cache_clear()
    yield
    tables.table_in.cache_clear()


def raising(error):
    def user_cache_dir(*_, **__):
        raise error

    return user_cache_dir


# The tables of the user's


@pytest.mark.parametrize(
    "answer",
    [
        raising(RuntimeError("could not determine the home directory")),
        raising(KeyError("getpwuid(): uid not found: 12345")),
        raising(OSError("no such user")),
        lambda *_, **__: "~/.cache/tilegym_rmsnorm",
        lambda *_, **__: "cache/tilegym_rmsnorm",
    ],
    ids=["RuntimeError", "KeyError", "OSError", "a folder called ~", "a relative folder"],
)
def test_an_unknown_folder_for_caches_is_no_cache(folders, monkeypatch, answer):
    platformdirs = pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(platformdirs, "user_cache_dir", answer)
    with pytest.warns(UserWarning, match="no home folder is known.*Set TILEGYM_RMSNORM_CACHE_DIR to") as told:
        assert user_folder() is None
        assert chosen() == rule()
        monkeypatch.setattr(installation, "visible_gpus", lambda: [installation.Gpu("an H100", "sm_90")])
        assert "the user's cache is off" in installation.describe()["tuned settings"]
    assert len(told) == 1


def test_a_cache_of_nobody_is_no_cache(monkeypatch):
    """The cache was a folder called ~nobody... in the working directory."""
    monkeypatch.setenv(CACHE_VARIABLE, "~nobody-of-this-name/tuned")
    with pytest.warns(UserWarning, match="expected a user that exists, got '~nobody-of-this-name/tuned'"):
        assert user_folder() is None


def test_a_home_that_is_no_folder_holds_no_table(folders, monkeypatch):
    """A service's HOME is often /dev/null: the table there was one to delete."""
    monkeypatch.setenv(CACHE_VARIABLE, os.devnull + "/.cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == rule()


CHILD = """
import os, pwd, sys, warnings
os.environ.pop("HOME", None)
if sys.argv[1] == "no entry":
    def getpwuid(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")
    pwd.getpwuid = getpwuid
import platformdirs  # now: the interpreter's folder may be another user's
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import user_folder
if sys.argv[1] == "setuid":
    os.setuid(12345)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(user_folder(), user_folder(), len(told), told[0].message)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="users have no numbers there")
@pytest.mark.parametrize("how", ["no entry", "setuid"])
def test_a_user_whose_number_has_no_name(how):
    if how == "setuid" and os.getuid() != 0:
        pytest.skip("only root may become another user")
    pytest.importorskip("platformdirs", reason="platformdirs is not installed")
    caches = (CACHE_VARIABLE, "XDG_CACHE_HOME", "HOME")
    environment = {name: value for name, value in os.environ.items() if name not in caches}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # without HOME there are no packages of the user's
    done = subprocess.run(
        [sys.executable, "-c", CHILD, how], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith("None None 1 no home folder is known"), done.stdout + done.stderr


# cuda-tile's own cache of compiled kernels


@pytest.fixture
def context(monkeypatch):
    """Call it with a folder to have cuda-tile keep compiled kernels there."""
    pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
    from cuda.tile._cext import default_tile_context

    def keep_in(folder):
        monkeypatch.setattr(default_tile_context.config, "cache_dir", folder)
        return default_tile_context.config

    return keep_in


@pytest.mark.parametrize("folder", [f"{os.devnull}/cutile-python", "~/.cache/cutile-python"])
def test_a_gpu_compiles_where_nothing_can_be_kept(context, monkeypatch, folder):
    """Each call compiled, and then failed as cuda-tile looked for what to evict."""
    from tilegym_rmsnorm.backends.cutile.runtime import machine

    config = context(str(folder))
    properties = type("Properties", (), {"name": "a GPU", "major": 9, "minor": 0, "multi_processor_count": 8})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.warns(UserWarning, match="not kept on disk.*Set CUDA_TILE_CACHE_DIR to a folder") as told:
        for _ in range(2):
            machine.GpuMachine(torch.device("cpu"))
    assert config.cache_dir is None and len(told) == 1


def test_a_folder_that_can_be_made_is_left_to_cuda_tile(context, tmp_path):
    from tilegym_rmsnorm.backends.cutile.runtime import disk_cache

    folder = str(tmp_path / "new" / "cache")
    for given in (folder, None):
        config = context(given)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            disk_cache.turn_off_where_it_fails()
        assert config.cache_dir == given


def test_cuda_tile_fails_there_and_compiles_without_its_cache(context):
    """The cache is turned off for this. Where this release of cuda-tile does not fail, turning it off may go."""
    keep_in = context
    from compiling import CompilingMachine, run_forward

    from tilegym_rmsnorm.backends.cutile.runtime import disk_cache, toolchain

    if toolchain.find_tileiras() is None:
        pytest.skip("tileiras is not installed")
    machine = CompilingMachine(90)

    def compile_one() -> None:
        first = by_rules("forward", 40, torch.float32, "few")
        run_forward(machine, first, 40, torch.float32, torch.float32, m=16)

    keep_in(f"{os.devnull}/cutile-python")
    with pytest.raises(NotADirectoryError):
        compile_one()
    with pytest.warns(UserWarning, match="not kept on disk"):
        disk_cache.turn_off_where_it_fails()
    compile_one()
    assert len(machine.results) == 1


def test_doctor_says_that_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", "~/.cache/cutile-python")
    assert installation.describe()["kernel cache"].startswith(
        "off: no home folder is known. To mend it: set CUDA_"
    )
