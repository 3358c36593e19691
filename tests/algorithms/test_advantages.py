"""Group advantages against values from the page of formulas, and their invariants."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.algorithms.advantages import group_advantages
from megatron_omni.algorithms.base import Advantages


def advantages(rewards, valid=None, groups=None, global_std=False, clip_max=5.0) -> Advantages:
    rewards = torch.tensor(rewards)
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else torch.tensor(valid)
    groups = torch.arange(len(rewards)) // 2 if groups is None else torch.tensor(groups)
    return group_advantages(rewards, valid, groups, global_std=global_std, clip_max=clip_max)


def test_unbiased_group_std():
    expected = torch.tensor([-0.70705, 0.70705, 0.70705, -0.70705])
    got = advantages([1.0, 3.0, 2.0, 0.0])
    torch.testing.assert_close(got.values, expected, atol=1e-4, rtol=0)
    assert got.zero_fraction == 0


def test_global_std_divides_all_groups_alike():
    rewards = torch.tensor([1.0, 3.0, 0.0, 2.0])
    expected = torch.tensor([-1.0, 1.0, -1.0, 1.0]) / (rewards.std() + 1e-4)
    torch.testing.assert_close(advantages([1.0, 3.0, 0.0, 2.0], global_std=True).values, expected)


@given(st.lists(st.floats(-10, 10, width=32), min_size=4, max_size=32), st.floats(-5, 5), st.floats(0.125, 8))
def test_invariant_to_shift_and_bounded(rewards, shift, clip_max):
    groups = [i // 4 for i in range(len(rewards))]
    got = advantages(rewards, groups=groups, clip_max=clip_max)
    assert got.values.isfinite().all() and (got.values.abs() <= clip_max).all()
    shifted = advantages([r + shift for r in rewards], groups=groups, clip_max=clip_max)
    for group in set(groups):
        rows = torch.tensor(groups) == group
        if torch.tensor(rewards)[rows].std(correction=0) > 0.1:
            torch.testing.assert_close(got.values[rows], shifted.values[rows], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("global_std", [False, True])
@pytest.mark.parametrize("poison", [0.0, 1e9, float("nan"), float("inf")])
def test_failed_samples_enter_no_statistic_and_weigh_nothing(poison, global_std):
    kept = advantages([1.0, 3.0, 0.0, 2.0, 4.0], groups=[0, 0, 1, 1, 1], global_std=global_std)
    got = advantages(
        [1.0, poison, 3.0, 0.0, 2.0, 4.0],
        valid=[True, False, True, True, True, True],
        groups=[0, 0, 0, 1, 1, 1],
        global_std=global_std,
    )
    rows = [0, 2, 3, 4, 5]
    torch.testing.assert_close(got.values[rows], kept.values)
    assert got.weights[1] == 0 and got.values[1] == 0
    assert got.weights.mean().item() == pytest.approx(1)


def test_a_group_of_one_and_a_group_of_equals_get_zero():
    got = advantages([5.0, 2.0, 2.0], groups=[0, 1, 1])
    assert got.values.tolist() == [0, 0, 0]
    assert got.zero_fraction == 1


def test_groups_are_found_by_number_wherever_they_stand():
    got = advantages([1.0, 0.0, 3.0, 2.0], groups=[7, 3, 7, 3])
    torch.testing.assert_close(got.values, advantages([1.0, 3.0, 0.0, 2.0]).values[[0, 2, 1, 3]])


def test_everything_failed_is_finite():
    got = advantages([1.0, 2.0], valid=[False, False])
    assert got.values.tolist() == [0, 0] and got.weights.tolist() == [0, 0]
