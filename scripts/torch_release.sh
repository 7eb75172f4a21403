#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# The tests with another release of PyTorch than that of constraints.txt, without the GPU, if there is one.
#   scripts/torch_release.sh 2.9.1                          all that may depend on the release
#   scripts/torch_release.sh 2.9.1 PYTEST ARGUMENT...       what these say, as for tests/run.sh
# The first call makes an environment for the release, .venv-torch-2.9.1, by $PYTHON or else python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh

# What the CUDA build of a release asks for. Its CPU build asks for none, and pip would take the newest.
release=${1-}
case $release in
  2.9.1) triton=3.5.1 ;;
  2.11.0) triton=3.6.0 ;;
  2.14.1) triton=3.8.0 ;;
  *) _stop "expected the release 2.9.1, 2.11.0 or 2.14.1, got '$release'; another has to be named here, with its Triton" ;;
esac
shift

if [ $# = 0 ]; then
  # Machine code, cuTile's interpreter, and configs as numbers: no release of PyTorch changes them, and their tests take
  # most of the time.
  for path in machine_code interpreter kernels/test_teams.py plans tuning/test_candidates.py; do
    [ -e "tests/$path" ] || _stop "tests/$path does not exist: expected a path to ignore, pytest would say nothing"
    set -- "$@" "--ignore=tests/$path"
  done
fi

folder=$ROOT/.venv-torch-$release
extras=(dev test-integrations bench cutile triton)
needed="torch>=$release $(_modules required "${extras[@]}") $(_modules optional "${extras[@]}")"
if [ -n "$(_missing "$folder/bin/python" $needed)" ]; then
  echo "installing torch $release and $(_target "${extras[@]}") into $folder, which takes minutes" >&2
  "${PYTHON:-python3}" -m venv "$folder"
  # All else in the versions of the other jobs, so that what fails here alone is due to the release; but numpy, as the
  # interpreter of Triton before 3.7 needs it.
  {
    grep -Ev '^(torch|triton)==' constraints.txt
    printf '%s\n' "torch==$release" "triton==$triton" "numpy<2.4"
  } >"$folder/constraints.txt"
  "$folder/bin/python" -m pip install -qq --no-compile -c "$folder/constraints.txt" -e "$(_target "${extras[@]}")"
  install_alone "$folder/bin/python" "${extras[@]}"
fi
PYTHON=$folder/bin/python CUDA_VISIBLE_DEVICES='' exec tests/run.sh "$@"
