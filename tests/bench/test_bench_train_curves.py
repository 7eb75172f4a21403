# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Loss curves of bench.train: which agree, how they are smoothed and drawn."""

import pytest

from bench.measure.provenance import describe_run
from bench.report import curves, training


def trained(norm, losses, **more):
    return {"norm": norm, "error": None, "losses": losses, **more}


def test_curves_agree_within_the_distance_of_the_first_ones_seeds(tmp_path):
    falling = [4.0 - 0.1 * step for step in range(20)]
    higher = lambda by: [loss + by for loss in falling]  # noqa: E731
    result = describe_run() | {"smoothed": 5, "note": None, "gpu": "NVIDIA H200"}
    result["trained"] = [
        {"norm": "broken", "error": "it broke"},
        trained("F.rms_norm", falling, other_losses=higher(0.1)),
        trained("rms_norm", higher(0.02)),
        trained("residual", higher(-0.2)),
        trained("fused", [*falling[:-1], float("nan")]),
    ]
    assert curves.noise_of(result) == pytest.approx(0.1)
    far = curves.distances_of(result)
    assert far["F.rms_norm"] == 0 and far["rms_norm"] == pytest.approx(0.02)
    told = curves.disagreeing(result)
    assert [line.partition(":")[0] for line in told] == ["residual", "fused"]
    assert told[0].endswith("its loss curve is 0.2000 from the first one; another seed's is 0.1000 from it")
    assert training.failures(result)[0] == "broken: it broke" and len(training.failures(result)) == 3
    curves.plot(result, "title", tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_is_a_moving_average():
    assert curves.smooth([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]
