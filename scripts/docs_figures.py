# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Puts the newest results that are kept into README.md, docs/performance.md, the pages of studies in docs/,
bench/results/README.md and the page beside each, and draws the picture of README.md.

    python scripts/docs_figures.py     needs what the benchmark needs: the extra `bench`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.measure.provenance import RESULTS  # noqa: E402
from bench.report import readme  # noqa: E402
from bench.studies import one_launch_or_two, rope, traced  # noqa: E402


def main() -> None:
    paths = readme.kept_results(RESULTS)
    readme.refresh_results(paths)
    training = max(RESULTS.glob("*/train.json"), key=lambda path: json.loads(path.read_text())["date"])
    readme.refresh_training(training)
    count = len(paths) + sum(each.refresh_page() for each in (one_launch_or_two, rope, traced))
    print(f"{count} results and {training.relative_to(ROOT)} are in the pages")


if __name__ == "__main__":
    main()
