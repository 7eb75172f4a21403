# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Origin of a figure: GPU, driver, toolkit, library versions, sources, tables, level of reproducibility, commit and
date. Part of every result."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tilegym_rmsnorm
from bench.measure.shapes import level_of
from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.cutile.runtime.toolchain import dotted, find_tileiras, package_version
from tilegym_rmsnorm.backends.cutile.runtime.user_folder import CACHE_VARIABLE, user_folder
from tilegym_rmsnorm.commands.installation import driver_gpus

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PEERS = ("quack-kernels", "nvidia-cutlass-dsl", "liger-kernel", "tilegym")  # of the extra `peers`
PACKAGE = "tilegym_rmsnorm"


def describe_run() -> dict[str, Any]:
    """The provenance part of a result; `gpu` and `driver` are None without a GPU."""
    has_gpu = torch.cuda.is_available()
    commit, is_dirty = describe_commit()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "sms": torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        if has_gpu
        else None,
        "driver": driver_gpus()[1] if has_gpu else None,
        "cuda": torch.version.cuda,
        "tileiras": _tileiras(),
        "versions": {
            "torch": torch.__version__,
            "triton": package_version("triton"),
            "cuda-tile": package_version("cuda-tile"),
            PACKAGE: tilegym_rmsnorm.__version__,
        }
        | {name: version for name in PEERS if (version := package_version(name))},
        "commit": commit,
        "dirty": is_dirty,
        "sources": hash_sources(),
        "teams": settings.teams(),
        "reproducible": tilegym_rmsnorm.get_reproducible(),
        "user_tables": None if (folder := user_folder()) is None else str(folder),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def describe_commit() -> tuple[str, bool | None]:
    """The commit and whether the tree differs from it: from TILEGYM_RMSNORM_COMMIT, else git, else "unknown"."""
    if named := os.environ.get(settings.COMMIT_VARIABLE):
        return named, None
    git = functools.partial(_output, "git", "-C", str(ROOT))
    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return commit or "unknown", None if commit is None or changes is None else bool(changes)


def choose_tables(folder: Path | None = None) -> None:
    """Lets the user's tables in this folder, or in TILEGYM_RMSNORM_CACHE_DIR, choose cutile's kernels before those that
    ship. Without either none do: what somebody tuned on a machine once is not what this package is.

    Of this process and those that it starts, which have another working directory. To be called before any kernel.
    """
    if folder is not None:
        os.environ[CACHE_VARIABLE] = str(folder)
    if CACHE_VARIABLE not in os.environ or (chosen := user_folder()) is None:
        os.environ[CACHE_VARIABLE] = "off"
    else:
        os.environ[CACHE_VARIABLE] = str(chosen.resolve())


def hash_sources(package: Path | None = None) -> str:
    """SHA-256 over the names and contents of the package's sources and tables: the same where the same code ran, also
    with local changes or without git."""
    package = package or Path(tilegym_rmsnorm.__file__).parent
    digest = hashlib.sha256()
    paths = [path for path in package.rglob("*") if path.suffix in (".py", ".json") and path.is_file()]
    for name, path in sorted((path.relative_to(package).as_posix(), path) for path in paths):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def gpu_slug(gpu: str | None) -> str:
    """The folder of a GPU model's results: 'NVIDIA H100 80GB HBM3' is nvidia-h100-80gb-hbm3; no GPU is cpu."""
    return "cpu" if gpu is None else re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def kept_in(results: Path = RESULTS, files: str = "*/*.json") -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files of this pattern that hold a result and lie in the folder of its GPU model. A damaged one: ValueError.

    So what else lies there is none, whatever its name: parts of runs, those of CI and of machines without a GPU, a file
    or an empty folder.
    """
    for path in sorted(results.glob(files)):
        try:
            result = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path}: expected a result in JSON, got {error}") from None
        gpu = result.get("gpu") if isinstance(result, dict) else None
        if gpu is not None and gpu_slug(gpu) == path.parent.name:
            yield path, result


def one_line(result: dict[str, Any]) -> str:
    """One line for people: what the figures of a result were taken on and with."""
    own = result["versions"].get(PACKAGE)
    others = ((name, version) for name, version in result["versions"].items() if name != PACKAGE)
    versions = [f"{name} {version}" for name, version in others if version]
    version = "" if own in (None, tilegym_rmsnorm.NOT_INSTALLED) else f" {own}"
    commit = result["commit"][:12] + (" with local changes" if result["dirty"] else "")
    where = [result["gpu"] or "no GPU"]
    where += [f"driver {result['driver']}"] if result["driver"] else []
    where += [f"CUDA {result['cuda']}"] if result["gpu"] and result["cuda"] else []
    where += [f"tileiras {result['tileiras']}"] if result["tileiras"] else []
    where += [f"the user's tables in {result['user_tables']}"] if result.get("user_tables") else []
    where += ["without teams"] if not result.get("teams", True) else []
    where += [f"under reproducible {level_of(result)!r}"] if level_of(result) != "run" else []
    own = f"{PACKAGE}{version} at commit {commit}"
    return ", ".join([*where, *versions, own, *parts_of_other_commits(result), result["date"][:10]])


def parts_of_other_commits(result: dict[str, Any]) -> list[str]:
    """List whose figures are of which other commit, where results were joined."""
    found = dict.fromkeys(
        f"{', '.join(process['providers'])} in part of commit {process['commit'][:12]}"
        for process in result.get("processes", [])
        if process.get("commit") not in (None, result["commit"])
    )
    return list(found)


def _tileiras() -> str | None:
    found = find_tileiras()
    if found is None:
        return None
    package = package_version("nvidia-cuda-tileiras") if found.source == "pip package" else None
    return package or dotted(found.release)


def _output(*command: str) -> str | None:
    """Read a command's output; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
