#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# Every test that this machine can run, in one command: finds or makes an environment, then calls pytest. Without a GPU
# that is the reference, registry, configs, kernels in their interpreters, and compiles for every architecture; with one
# the kernels run on it. What is skipped says why.
#   tests/run.sh [PYTEST ARGUMENT]...      tests/run.sh -m gpu      tests/run.sh tests/api/test_ops.py -k layouts
# PYTHON=... chooses the interpreter; CUDA_VISIBLE_DEVICES= hides the GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
ensure_environment dev bench cutile triton

options=(-rfEs) # a line for each failure, error and skip
if "$PYTHON" -c 'import xdist' 2>/dev/null; then
  # Several processes, each on one thread: tests of small tensors gain nothing from more. Inductor's own pool is off:
  # each of these processes would start one process per core.
  export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
  # conftest.py says how tests share a GPU.
  most=$("$PYTHON" -c 'import torch; print(14 if torch.cuda.is_available() else 8)')
  # The longest tests first (conftest.py), handed out one by one: else a process has minutes of them left at the end.
  options+=(-n auto --maxprocesses "$most" --dist load --maxschedchunk 1)
fi
exec "$PYTHON" -m pytest "${options[@]}" "$@"
