# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Models for which transformers calls `kernelize` itself, by `use_kernels=True`. test_kernel_mapping.py runs this file
in a process of its own: transformers marks its norms while it is imported, where it takes the installed `kernels`."""

import copy
import importlib.metadata
import sys

import torch

NORMS = {"Llama": ("RMSNorm", 5), "Qwen3_5": ("RMSNormZeroCentered", 7)}


def name_a_release_of_kernels(release):
    """Say that `kernels` is of a release that transformers takes: 5.23 takes none before 0.18.2."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: release if name == "kernels" else version(name)


def main():
    from hf_models import ARCHITECTURES, results
    from transformers.utils import is_kernels_available

    from tilegym_rmsnorm.integrations.huggingface import kernel_mapping, mapping

    if not is_kernels_available():
        sys.exit("this transformers does not take kernels 0.18.2")
    try:
        from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
    except ImportError:
        sys.exit("this transformers has no get_kernel_mapping_transformers")

    def of_ours(model):
        return [each for each in model.modules() if each.forward.__func__ is mapping.TileGymRMSNorm.forward]

    chosen = [each for each in ARCHITECTURES if each.name in NORMS]
    without = chosen[0].built()
    without.set_use_kernels(True)
    assert not of_ours(without)
    get_kernel_mapping_transformers().update(kernel_mapping("cpu"))
    for architecture in chosen:
        layer, count = NORMS[architecture.name]
        original = architecture.built()
        model, given = copy.deepcopy(original), architecture.given(torch.float32)
        model.set_use_kernels(True)
        found = of_ours(model)
        assert {type(each).kernel_layer_name for each in found} == {layer} and len(found) == count
        model.train(), original.train()
        assert of_ours(model) == found
        torch.testing.assert_close(results(model, given), results(original, given))
        print("passed", architecture.name)


if __name__ == "__main__":
    name_a_release_of_kernels("0.18.2")
    main()
