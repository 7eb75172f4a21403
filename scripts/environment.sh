# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# To be sourced by the commands that run on a fresh machine (tests/run.sh, bench/run.sh):
#   ensure_environment EXTRA... [-- MODULE...]
# sets PYTHON to an interpreter that has what these extras of pyproject.toml are for, and the modules, in the versions that
# it asks for, and puts the checkout on PYTHONPATH. Ends the script with one line if it cannot.
#
# The interpreter named by the variable PYTHON is used as it is. Otherwise the first of .venv, python3 and python that
# has everything, otherwise .venv is made with pip. What only adds a backend (cutile, triton), libraries to compare with
# (peers) or to test with (test-integrations), a check, of compiled kernels (cuobjdump) or of types (mypy), the site of
# docs/ (docs), or a page of figures (plotly), is not worth a failure: without a network the rest still runs, and one line
# says what is missing. An active environment that is not taken is named too, with how to take it.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

ensure_environment() {
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
  _keep_bytecode
  local required optional candidate missing extras=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do
    extras+=("$1")
    shift
  done
  required="$(_modules required "${extras[@]}") ${*:2}"
  optional=$(_modules optional "${extras[@]}")
  set -- "${extras[@]}"

  if [ -n "${PYTHON:-}" ]; then
    [ -z "$(_missing "$PYTHON" sys)" ] || _stop "PYTHON=$PYTHON is no Python of at least 3.10 that runs here"
    missing=$(_missing "$PYTHON" $required)
    [ -z "$missing" ] || _stop "PYTHON=$PYTHON lacks:$missing. Install them there: $PYTHON -m pip install -e '$(_target "$@")'"
    _warn_missing "$PYTHON" $optional
    return
  fi

  for candidate in "$ROOT/.venv/bin/python" python3 python; do
    if [ -z "$(_missing "$candidate" $required $optional)" ]; then
      PYTHON=$candidate
      [ "$candidate" != "$ROOT/.venv/bin/python" ] || _note_active "$(_target "$@")" $required $optional
      return
    fi
  done

  _note_active "$(_target "$@")" $required $optional
  if _install "$@"; then
    PYTHON=$ROOT/.venv/bin/python
    missing=$(_missing "$PYTHON" $required)
    [ -z "$missing" ] || _stop "$ROOT/.venv still lacks:$missing, although pip succeeded"
    _warn_missing "$PYTHON" $optional
    return
  fi

  for candidate in "$ROOT/.venv/bin/python" python3 python; do
    if [ -z "$(_missing "$candidate" $required)" ]; then
      PYTHON=$candidate
      _warn_missing "$PYTHON" $optional
      return
    fi
  done
  _stop "no interpreter here has all of:$(printf " %s" $required), and pip could not install them into $ROOT/.venv (no network?)." \
    "Name one that has them: PYTHON=/path/to/python $0"
}

# Containers tell Python to write no bytecode. Then each process compiles what it imports, of torch for 5 to 10 seconds,
# and tests start hundreds. So it is kept for them, but below the checkout: nothing is written to the environment.
_keep_bytecode() {
  [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] || return 0
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$ROOT/build/bytecode}"
}

# What the extras are for: what is required, or what may be missing. Modules, distributions with a range of versions
# (cuda-tile is the module cuda.tile), and the programs tileiras and cuobjdump.
_modules() {
  local kind=$1 extra
  shift
  [ "$kind" = optional ] || printf 'torch>=2.9 '
  for extra in "$@"; do
    case $kind:$extra in
      required:bench) printf 'matplotlib tabulate tqdm ' ;; # training asks for transformers
      required:dev) printf 'hypothesis pytest yaml ' ;;     # format.sh asks for ruff, the job types for mypy
      optional:bench) printf 'plotly ' ;; # report.html
      optional:cutile) [ "$(uname -s)" != Linux ] || printf 'cuda-tile>=1.7,<1.8 tileiras ' ;;
      optional:dev)
        printf 'mypy '
        [ "$(uname -s)" != Linux ] || printf 'cuobjdump '
        ;;
      optional:test-integrations)
        printf 'accelerate cloudpickle dill kernels>=0.17 lightning onnx onnxruntime onnxscript peft torchtitan transformers>=4.57 '
        [ "$(uname -s)" != Linux ] || printf 'liger_kernel megatron.core ' # megatron-core: wheels for CPython up to 3.13
        ;;
      optional:triton) [ "$(uname -s)" != Linux ] || printf 'triton ' ;;
      optional:docs) printf 'mkdocs material mkdocstrings_handlers.python black ' ;;
      optional:peers) [ "$(uname -s)" != Linux ] || printf 'quack liger_kernel tilegym ' ;;
      required:cutile | required:docs | required:triton | required:peers | required:test-integrations) ;;
      *) _stop "ensure_environment: unknown extra $extra" ;;
    esac
  done
}

# Those of these things that an interpreter lacks, each after a space; all of them if it does not run or is too old.
_missing() {
  local python=$1
  shift
  "$python" - "$@" 2>/dev/null <<'PY' || printf ' %s' "$@"
import glob
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import sysconfig

if sys.version_info < (3, 10):
    sys.exit("too old")


def has(thing):
    if thing == "torchtitan" and sys.version_info < (3, 11) or thing == "megatron.core" and sys.version_info >= (3, 14):
        return True  # pip installs neither there: tests/alone.txt, pyproject.toml
    if thing == "tileiras":  # where cuda-tile looks for it
        folders = [os.path.join(os.environ.get("CUDA_HOME") or os.devnull, "bin"), *glob.glob("/usr/local/cuda*/bin")]
        return bool(version_of("nvidia-cuda-tileiras")) or has_program(thing, folders)
    if thing == "cuobjdump":  # where the tests look for it
        packages = sysconfig.get_path("purelib")
        folders = [os.path.join(packages, folder) for folder in ("nvidia/cu13/bin", "triton/backends/nvidia/bin")]
        return has_program(thing, folders)
    name, lowest, below = re.fullmatch(r"([\w.-]+)(?:>=([\d.]+))?(?:,<([\d.]+))?", thing).groups()
    if not has_module(name.replace("-", ".")):
        return False
    version = version_of(name) if lowest else ()
    return not lowest or (numbers(lowest) <= version and (not below or version < numbers(below)))


def has_program(name, folders):
    return bool(shutil.which(name) or shutil.which(name, path=os.pathsep.join(folders)))


def has_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that should hold it
        return False


def version_of(distribution):
    try:
        return numbers(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ()


def numbers(version):  # that it starts with: 2.11.0a0+cu130 is (2, 11, 0)
    return tuple(map(int, re.match(r"\d+(?:\.\d+)*", version)[0].split(".")))


print("".join(f" {thing}" for thing in sys.argv[1:] if not has(thing)))
PY
}

_warn_missing() {
  local python=$1 missing
  shift
  missing=$(_missing "$python" "$@")
  [ -z "$missing" ] || echo "note: $python lacks:$missing; what needs them is left out (python -m tilegym_rmsnorm doctor says more)" >&2
}

# One line where an environment is active and another one runs: who made it expects it to be taken.
_note_active() {
  local active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}} target=$1 missing
  [ -n "$active" ] && [ "$active" != "$ROOT/.venv" ] || return 0
  shift
  missing=$(_missing python3 "$@")
  [ -z "$missing" ] || missing=" it lacks$missing; python3 -m pip install -e '$target', then"
  echo "note: runs in $ROOT/.venv. To run in the active environment, $active:$missing PYTHON=python3 $0" >&2
}

# Makes .venv and installs the extras into it. One line says so; pip prints its errors only. Machines without a GPU get the
# versions that CI tests. No bytecode is compiled, which for all of torch takes a minute: an import compiles what it needs.
_install() {
  local base=python3 constraints=()
  [ -z "$(_missing python3 venv)" ] || base=python
  [ -z "$(_missing "$base" venv)" ] || _stop "neither python3 nor python is a Python of at least 3.10"
  nvidia-smi -L >/dev/null 2>&1 || constraints=(-c "$ROOT/constraints.txt")
  echo "installing $(_target "$@") into $ROOT/.venv, which takes minutes" >&2
  [ -x "$ROOT/.venv/bin/python" ] || "$base" -m venv "$ROOT/.venv" >&2 || return 1
  "$ROOT/.venv/bin/python" -m pip install -qq --no-compile ${constraints[@]+"${constraints[@]}"} -e "$(_target "$@")" >&2 &&
    install_alone "$ROOT/.venv/bin/python" "$@"
}

# Behind pip's installation of these extras: libraries to test with whose requirements are heavy, and not needed there;
# and in a folder of its own, for tests that add it to sys.path, an older release of one.
install_alone() {
  local python=$1 prefix
  shift
  [[ " $* " == *" test-integrations "* ]] || return 0
  prefix=$("$python" -c 'import sys; print(sys.prefix)')
  "$python" -m pip install -qq --no-compile --no-deps -r "$ROOT/tests/alone.txt" >&2 &&
    "$python" -m pip install -qq --no-compile --no-deps --upgrade --target "$prefix/torchtitan-0.2.2" torchtitan==0.2.2 >&2
}

# What pip is asked for: the checkout with the extras.
_target() {
  local IFS=,
  echo "$ROOT[$*]"
}

_stop() {
  echo "$0: $*" >&2
  exit 1
}
