# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Makes an environment with the packages that some extras of pyproject.toml bring, and no others that are here.

    python scripts/only_extras.py FOLDER EXTRA...     as after pip install -e ".[EXTRA,...]" in an empty environment

The packages are links to this interpreter's: it takes seconds and no network. So tests run without what happens to be
installed beside them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # which pytest brings there

ROOT = Path(__file__).resolve().parents[1]


def installed_for(requirements: list[str]) -> dict[str, Distribution]:
    """The distributions that these requirements bring, those that are installed here, by their names."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [(line, "") for line in requirements]  # each with the extra that asks for it
    while todo:
        line, extra = todo.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            installed = distribution(requirement.name)
        except PackageNotFoundError:
            continue  # tests/run.sh says what it misses
        found[installed.name] = installed
        for extra in {"", *requirement.extras} - {extra for name, extra in seen if name == installed.name}:
            seen.add((installed.name, extra))
            todo += [(each, extra) for each in installed.requires or ()]
    return found


def make(folder: Path, distributions: list[Distribution]) -> None:
    """Make the environment anew, with links to the modules, packages and metadata of these distributions."""
    command = [sys.executable, "-m", "venv", "--clear", "--without-pip", folder]
    subprocess.run(command, check=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(
        subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    )
    for each in distributions:
        tops = {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not os.path.lexists(packages / top):  # several distributions share the folder nvidia
                (packages / top).symlink_to(Path(str(each.locate_file(top))).absolute())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("extras", nargs="+", metavar="EXTRA")
    given = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"]]
    for extra in given.extras:
        asked += project["optional-dependencies"][extra]
    found = installed_for([project["name"], *asked])
    make(given.folder, list(found.values()))
    print(f"{given.folder}: {len(found)} distributions")


if __name__ == "__main__":
    main()
