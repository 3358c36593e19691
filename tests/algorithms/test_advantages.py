"""Group advantages against values from the page of formulas, and their invariants."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.algorithms.advantages import group_advantages
from megatron_omni.algorithms.base import Advantages
from megatron_omni.rewards.combination import GlobalRewards


def advantages(rewards, valid=None, groups=None, global_std=False, clip_max=5.0) -> Advantages:
    rewards = torch.tensor(rewards)
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else torch.tensor(valid)
    groups = torch.arange(len(rewards)) // 2 if groups is None else torch.tensor(groups)
    only = GlobalRewards({"reward": 1.0}, rewards[None], valid[None], groups)
    return group_advantages(only, "sum", global_std=global_std, clip_max=clip_max)


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


# Several rewards


@st.composite
def several(draw) -> GlobalRewards:
    """Two or three rewards of four groups of four; each spreads in each group, and some samples failed."""
    names = draw(st.sampled_from([("a", "b"), ("a", "b", "c")]))
    weights = {name: draw(st.floats(-2, 2).filter(lambda weight: abs(weight) > 0.1)) for name in names}
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    parts = torch.rand(len(names), 16, generator=random) * 4
    valid = torch.rand(len(names), 16, generator=random) > draw(st.sampled_from([0.0, 0.1]))
    return GlobalRewards(weights, parts.where(valid, 0.0), valid, torch.arange(16) // 4)


def combined(rewards: GlobalRewards, combination: str, global_std: bool = False) -> Advantages:
    return group_advantages(rewards, combination, global_std=global_std, clip_max=5.0)


def alone(rewards: GlobalRewards, row: int, weight: float = 1.0) -> GlobalRewards:
    """One of the rewards, on the samples that all of them gave a value."""
    return GlobalRewards({"a": weight}, rewards.parts[row][None], rewards.valid[None], rewards.prompt_id)


@given(several())
def test_the_sum_is_that_of_the_weighted_values(rewards):
    total = sum(w * part for w, part in zip(rewards.weights.values(), rewards.parts, strict=True))
    as_one = GlobalRewards({"sum": 1.0}, total[None], rewards.valid[None], rewards.prompt_id)
    torch.testing.assert_close(combined(rewards, "sum").values, combined(as_one, "sum").values)


@given(several(), st.booleans())
def test_separate_advantages_are_linear_in_the_weights(rewards, global_std):
    expected = sum(
        weight * combined(alone(rewards, row), "separate", global_std).values
        for row, weight in enumerate(rewards.weights.values())
    )
    torch.testing.assert_close(
        combined(rewards, "separate", global_std).values, expected.clamp(-5, 5), atol=1e-5, rtol=1e-4
    )


@given(several(), st.floats(0.1, 10), st.floats(-5, 5), st.booleans())
def test_separate_advantages_do_not_depend_on_the_scale_and_shift_of_one_reward(
    rewards, scale, shift, global_std
):
    parts = rewards.parts.clone()
    parts[0] = parts[0] * scale + shift
    other = GlobalRewards(rewards.weights, parts, rewards.parts_valid, rewards.prompt_id)
    # The 1e-4 beside the std is all that knows the scale.
    torch.testing.assert_close(
        combined(other, "separate", global_std).values,
        combined(rewards, "separate", global_std).values,
        atol=0.05,
        rtol=0.02,
    )


def test_a_large_scale_drowns_the_other_reward_in_the_sum_but_not_separately():
    parts = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 100.0, 100.0]])
    rewards = GlobalRewards({"a": 1, "b": 1}, parts, parts >= 0, torch.zeros(4, dtype=torch.int64))
    total, separate = combined(rewards, "sum").values, combined(rewards, "separate").values
    assert (total[1] - total[0]) < 0.02 * (total[2] - total[0])
    torch.testing.assert_close(separate, torch.tensor([-1.7320, 0.0, 0.0, 1.7320]), atol=1e-3, rtol=0)


@given(several(), st.integers(0, 15), st.sampled_from(["sum", "separate"]), st.floats(-1e9, 1e9))
def test_a_sample_that_one_reward_failed_on_is_masked_whatever_stands_in_its_place(
    rewards, sample, combination, poison
):
    valid, parts = rewards.parts_valid.clone(), rewards.parts.clone()
    valid[0, sample], parts[0, sample] = False, poison
    got = combined(GlobalRewards(rewards.weights, parts, valid, rewards.prompt_id), combination)
    assert got.weights[sample] == 0 and got.values[sample] == 0
    others = torch.arange(16) != sample
    fewer = GlobalRewards(
        rewards.weights, rewards.parts[:, others], rewards.parts_valid[:, others], rewards.prompt_id[others]
    )
    torch.testing.assert_close(got.values[others], combined(fewer, combination).values)
    assert got.weights.mean().item() == pytest.approx(1)


@given(several(), st.sampled_from(["sum", "separate"]))
def test_one_reward_of_weight_one_is_the_same_either_way(rewards, combination):
    one = alone(rewards, 0)
    torch.testing.assert_close(combined(one, combination).values, combined(one, "sum").values, atol=0, rtol=0)
