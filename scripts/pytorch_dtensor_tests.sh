#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# PyTorch's own tests of norms of DTensors, by torch.nn.RMSNorm and then by RMSNorm of this package in its place.
#   scripts/pytorch_dtensor_tests.sh CHECKOUT [PYTEST ARGUMENT...]
#   BACKEND=cutile TILEGYM_RMSNORM_INTERPRET=1 scripts/pytorch_dtensor_tests.sh CHECKOUT -k "DistMathOpsTest and norm"
# CHECKOUT: PyTorch's sources, of the release that $PYTHON, or else python3, has, which needs pytest and expecttest.
# Without a GPU those tests leave RMSNorm out, and here they do not. BACKEND: of RMSNorm; no kernel that is named takes
# the LocalTensor of the other class of tests.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tests=${1:?expected the path of a checkout of PyTorch}/test/distributed/tensor/test_math_ops.py
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sed 's/self\.device_type == "cuda" and hasattr(torch\.nn, "RMSNorm")/hasattr(torch.nn, "RMSNorm")/' "$tests" \
  >"$folder/test_math_ops.py"
# The processes that a test starts import this too, before they import the test.
mkdir "$folder/replaced"
cat >"$folder/replaced/sitecustomize.py" <<'PYTHON'
import os

import torch

import tilegym_rmsnorm

torch.nn.RMSNorm = tilegym_rmsnorm.RMSNorm.configured(backend=os.environ.get("BACKEND"))
PYTHON

status=0
for path in "$root" "$root:$folder/replaced"; do
  if [ "$path" = "$root" ]; then echo "== torch.nn.RMSNorm"; else echo "== tilegym_rmsnorm.RMSNorm"; fi
  (cd "$folder" && PYTHONPATH=$path:${PYTHONPATH-} "${PYTHON:-python3}" -m pytest -p no:cacheprovider -q --no-header -rA \
    --show-capture=no --tb=short -k "layer_norm or rms" "$@" test_math_ops.py) || status=1
done
exit $status
