"""`tools/benchmark/scoring.py` at small size; that both ways of scoring train alike it checks itself."""

import math

import pytest

from tests.tools.test_benchmarks import last_column


@pytest.mark.slow
def test_scoring_benchmark_finds_equal_metrics_and_prints_finite_ratios():
    ratios = last_column("scoring.py", "--shares", "0", "1")
    assert len(ratios) == 4
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
