# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Puts the newest results that are kept into README.md, docs/performance.md, the pages of studies in docs/,
bench/results/README.md and the page beside each, and draws the picture of README.md.

    python scripts/docs_figures.py     needs what the benchmark needs: the extra `bench`
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.measure.provenance import RESULTS, kept_in  # noqa: E402
from bench.report import readme  # noqa: E402
from bench.studies import one_launch_or_two, rope, torchtitan, traced  # noqa: E402


def main() -> None:
    paths = readme.kept_results(RESULTS)
    readme.refresh_results(paths)
    training = [path for path, _ in kept_in(RESULTS, "*/train-*.json")]
    readme.refresh_training(training)
    count = len(paths) + sum(each.refresh_page() for each in (one_launch_or_two, rope, torchtitan, traced))
    print(f"{count + len(training)} results are in the pages")


if __name__ == "__main__":
    main()
