"""`tools/benchmark/pipeline_bubble.py`: how long stages wait, on the clock and by hand."""

import pytest

from tools.benchmark.pipeline_bubble import QUICK, Case, idle_shares, results


def test_idle_share_is_what_a_stage_does_not_work_between_the_first_call_and_the_last():
    first, second = [(0.0, 1.0), (1.0, 2.0)], [(1.0, 2.0), (2.0, 5.0)]
    assert idle_shares([first, second]) == pytest.approx([3 / 5, 1 / 5])


@pytest.mark.parametrize(
    ("case", "share"),
    [(Case(4, 1, 8), 3 / 11), (Case(2, 2, 4), 1 / 9), (Case(4, 1, 8, passes=5), 3 / 43), (Case(1, 1, 3), 0)],
)
def test_theory(case: Case, share: float):
    assert case.theory == pytest.approx(share)


@pytest.mark.slow
def test_every_stage_works_and_waits():
    measured = list(results(QUICK, 0.005))
    assert [case for case, _ in measured] == list(QUICK)
    for case, shares in measured:
        assert len(shares) == case.stages
        assert all(0 < share < 1 for share in shares)
