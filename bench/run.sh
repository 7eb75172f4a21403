#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# The benchmark in one command: finds or makes an environment, checks every backend, then times it.
#   bench/run.sh [--quick] [--shapes 4096x4096,...] [--dtype bfloat16,...] [--provider cutile,...] [--op backward,...]
#                [--peers] [--grid] [--out DIR] [--p-rows]
# bench/run.sh --help says more, bench/README.md how it measures.
# PYTHON=... chooses the interpreter.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
extras=(bench cutile triton)
for argument in "$@"; do
  [[ $argument != --peers && $argument != --grid ]] || extras=(bench cutile triton peers)
done
ensure_environment "${extras[@]}"
exec "$PYTHON" -m bench.run "$@"
