"""The benchmarks run and print ratios. How large these are depends on the machine, and is not tested."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def last_column(script: str, *flags: str) -> list[float]:
    """The numbers that end the rows of the table that `script` prints."""
    done = subprocess.run(
        [sys.executable, f"tools/benchmark/{script}", "--quick", "--repetitions", "1", *flags],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [float(number) for number in re.findall(r" {3,}(\d+\.\d+|nan|inf)$", done.stdout, re.MULTILINE)]


def test_transformer_benchmark_prints_a_finite_ratio():
    (ratio,) = last_column("dit.py")
    assert math.isfinite(ratio) and ratio > 0


@pytest.mark.slow
def test_iteration_benchmark_finds_equal_results_and_prints_finite_ratios():
    ratios = last_column("flow_grpo.py", "--threads", "1", "--guidance", "4")
    assert len(ratios) == 3
    assert ratios[0] == 1
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)


@pytest.mark.slow
def test_conversion_benchmark_gets_the_same_bytes_back_and_prints_finite_ratios():
    ratios = last_column("convert.py")
    assert len(ratios) == 7 and ratios[:2] == [1, 1]
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)
