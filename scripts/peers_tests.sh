#!/usr/bin/env bash
# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
#
# Other libraries' own tests of RMSNorm, unmodified, with the adapters of this package in the place of what they test.
#   scripts/peers_tests.sh LIBRARY CHECKOUT [PYTEST ARGUMENT...]
#   scripts/peers_tests.sh tilegym ../TileGym --junitxml=tilegym.xml
# LIBRARY: tilegym, quack, liger, apex or transformer_engine. CHECKOUT: its sources, of the release that the adapter was
# written for. $PYTHON, or else python3, has this package, pytest and what the library needs: extra `peers`. The library
# itself is taken from the checkout. ORIGINAL=1: the library's own functions, to compare. docs/coming-from.md says what
# fails, and why.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
library=${1:?expected tilegym, quack, liger, apex or transformer_engine}
checkout=$(cd "${2:?expected the path of a checkout of $library}" && pwd)
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Imported by pytest before any test is. test_perf measures, and the tests left out of quack's are about its own
# kernels: their configurations and their cache.
case $library in
  tilegym)
    sources=$checkout/src
    tests=(tests/ops/test_rms_norm.py tests/ops/experimental/test_rmsnorm_backward.py -k "test_op and not triton and not tilecpp")
    cat >"$folder/adapters.py" <<'PYTHON'
from tilegym_rmsnorm.integrations import tilegym

tilegym.register("cutile")
PYTHON
    ;;
  quack)
    sources=$checkout
    tests=(tests/test_rmsnorm.py -k "not compile_cache and not cluster and not tuned and not autotune")
    cat >"$folder/adapters.py" <<'PYTHON'
import sys

import quack

from tilegym_rmsnorm.integrations.quack import QuackRMSNorm, rmsnorm, rmsnorm_bwd, rmsnorm_fwd

quack.rmsnorm = rmsnorm
module = sys.modules["quack.rmsnorm"]  # of which quack itself hides the name behind the function
module.rmsnorm, module.QuackRMSNorm = rmsnorm, QuackRMSNorm
module.rmsnorm_fwd, module.rmsnorm_bwd = rmsnorm_fwd, rmsnorm_bwd
PYTHON
    ;;
  liger)
    sources=$checkout/src:$checkout
    tests=(test/transformers/test_rms_norm.py test/transformers/test_fused_add_rms_norm.py -k "not dtensor")
    cat >"$folder/adapters.py" <<'PYTHON'
import importlib

from tilegym_rmsnorm.integrations import liger

NAMES = "liger_rms_norm", "liger_fused_add_rms_norm", "LigerRMSNorm", "LigerFusedAddRMSNorm"
for name in ("functional", "rms_norm", "fused_add_rms_norm"):
    module = importlib.import_module(f"liger_kernel.transformers.{name}")
    for each in NAMES:
        if hasattr(module, each):
            setattr(module, each, getattr(liger, each))
PYTHON
    ;;
  apex)
    sources=$checkout
    tests=(tests/L0/run_fused_layer_norm/test_fused_layer_norm.py -k "rms and not export")
    cat >"$folder/adapters.py" <<'PYTHON'
import apex.normalization
from apex.normalization import fused_layer_norm

from tilegym_rmsnorm.integrations import apex as adapter

for module in (apex.normalization, fused_layer_norm):
    module.FusedRMSNorm, module.MixedFusedRMSNorm = adapter.FusedRMSNorm, adapter.MixedFusedRMSNorm
PYTHON
    ;;
  transformer_engine)
    sources=$checkout
    tests=(tests/pytorch/test_numerics.py tests/pytorch/test_fusible_ops.py -k "test_rmsnorm_accuracy or (TestBasicOps and test_rmsnorm)")
    cat >"$folder/adapters.py" <<'PYTHON'
"""TransformerEngine would have to be built, and of it these tests call RMSNorm and containers alone. So this stands for
it: modules that have every name, with what the two tests need, and mocks for what their files import besides."""

import contextlib
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

import torch

from tilegym_rmsnorm.integrations.transformer_engine import RMSNorm

PACKAGES = "transformer_engine", "transformer_engine_torch"
NAMES = {"RMSNorm": RMSNorm, "Sequential": torch.nn.Sequential, "Quantize": torch.nn.Identity}
NAMES |= {"autocast": lambda **_: contextlib.nullcontext(), "is_bf16_available": lambda: True}
NAMES |= {"get_device_compute_capability": torch.cuda.get_device_capability}


class Missing(MagicMock):
    def __instancecheck__(self, instance):
        return False


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("is_") and name not in NAMES:  # such as is_fp8_available
            return lambda return_reason=False: (False, "no TransformerEngine") if return_reason else False
        return NAMES.get(name) or Missing(name=name)


class Finder:
    def find_spec(self, name, path=None, target=None):
        is_theirs = name.split(".")[0] in PACKAGES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_theirs else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
PYTHON
    ;;
  *)
    echo "expected tilegym, quack, liger, apex or transformer_engine, got $library" >&2
    exit 2
    ;;
esac

plugin=(-p adapters)
if [ -n "${ORIGINAL-}" ]; then plugin=(); fi
cd "$checkout"
PYTHONPATH=$folder:$root:$sources:${PYTHONPATH-} "${PYTHON:-python3}" -m pytest -p no:cacheprovider -q --no-header \
  --tb=short "${plugin[@]}" "${tests[@]}" "$@"
