"""`tools/benchmark/rollout.py` at small size; that both draw the same pictures it checks itself."""

import math

import pytest

from tests.rollout.vllm_omni.engine_process import PYTHON
from tests.tools.test_benchmarks import last_column


@pytest.mark.slow
@pytest.mark.xdist_group("vllm_omni")
def test_rollout_benchmark_finds_equal_pictures_and_prints_finite_ratios():
    ratios = last_column("rollout.py", "--rollout-python", str(PYTHON))
    assert len(ratios) == 4 and ratios[::2] == [1, 1]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
