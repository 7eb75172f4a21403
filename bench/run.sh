#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# The benchmark in one command: finds or makes an environment, checks every backend, then times it.
# It leaves JSON and CSV; with a GPU pictures and a page for a browser, report.html, too.
#   bench/run.sh [--quick] [--shapes 4096x4096,...] [--dtype bfloat16,...] [--provider cutile,...] [--op backward,...]
#                [--peers] [--grid] [--block] [--widths SEED [--share K/N]] [--warm] [--p-rows] [--tables FOLDER]
#                [--out FOLDER]
# bench/README.md says how it measures, and --help, once its environment is there, what each option does.
# PYTHON=... chooses the interpreter.

set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"

# Installs nothing: where no interpreter has what the options are read with, the text above is the help.
print_help() {
  local python
  for python in ${PYTHON:+"$PYTHON"} "$ROOT/.venv/bin/python" python3 python; do
    if [ -z "$(_missing "$python" $(_modules required bench))" ]; then
      PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m bench.run --help
    fi
  done
  sed -n '/^# The benchmark/,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit
}

extras=(bench cutile triton)
for argument in "$@"; do
  case $argument in
    -h | --help) print_help ;;
    --peers | --grid) extras=(bench cutile triton peers) ;;
  esac
done
ensure_environment "${extras[@]}"
exec "$PYTHON" -m bench.run "$@"
