"""`tools/benchmark/weight_transfer.py` at small size: what arrives is checked by the tool itself."""

import math

import pytest

from tests.tools.test_benchmarks import last_column


@pytest.mark.slow
def test_weight_transfer_benchmark_prints_finite_ratios():
    ratios = last_column("weight_transfer.py")
    assert len(ratios) == 2 + 2 * 3 * 2
    assert all(math.isfinite(ratio) for ratio in ratios)
