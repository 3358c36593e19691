"""Several rewards of the same samples become one number, whatever happens to one of them or in what order."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_omni.algorithms.advantages import group_advantages
from megatron_omni.errors import UserError
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rewards.pool import RewardPool
from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import PROMPTS, arguments, launch, metrics

SLOW = "tests.rewards.example_rewards:slow_first_pixel"


@st.composite
def several(draw) -> GlobalRewards:
    """Up to three rewards of up to twelve samples, some of which failed."""
    names = ["a", "b", "c"][: draw(st.integers(1, 3))]
    count = draw(st.integers(1, 12))
    numbers = st.floats(-10, 10, width=32)
    shape, size = (len(names), count), len(names) * count
    parts = torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size))).reshape(shape)
    valid = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size))).reshape(shape)
    weights = {name: draw(st.floats(-3, 3, width=32)) for name in names}
    return GlobalRewards(weights, parts, valid, torch.arange(count) // 2)


@given(several(), st.floats(-4, 4, width=32))
def test_values_are_linear_in_the_weights(rewards, factor):
    scaled = replace(rewards, weights={name: factor * w for name, w in rewards.weights.items()})
    torch.testing.assert_close(scaled.values, factor * rewards.values, atol=1e-4, rtol=1e-5)
    alone = [
        replace(
            rewards,
            weights={name: weight if name == only else 0.0 for name, weight in rewards.weights.items()},
        )
        for only in rewards.weights
    ]
    total = sum(each.values for each in alone)
    torch.testing.assert_close(total, rewards.values, atol=1e-4, rtol=1e-5)


@given(several(), st.data())
def test_a_failed_part_masks_its_sample_and_no_other(rewards, data):
    row = data.draw(st.integers(0, len(rewards.weights) - 1))
    sample = data.draw(st.integers(0, len(rewards.prompt_id) - 1))
    broken = rewards.parts_valid.clone()
    broken[row, sample] = False
    after = replace(rewards, parts_valid=broken)
    others = torch.arange(len(rewards.prompt_id)) != sample
    assert not after.valid[sample]
    assert torch.equal(after.valid[others], rewards.valid[others])
    assert torch.equal(after.values[others], rewards.values[others])
    assert after.failed == len(after.prompt_id) - len(after.valid_values())
    assert after.failed - rewards.failed == int(rewards.valid[sample])


@given(several(), st.data())
def test_whatever_stands_in_a_failed_place_is_never_seen(rewards, data):
    poison = data.draw(st.sampled_from([math.nan, math.inf, 1e30]))
    other = replace(rewards, parts=rewards.parts.where(rewards.parts_valid, poison))
    assert torch.equal(other.valid_values(), rewards.valid_values())
    assert other.means() == pytest.approx(rewards.means(), nan_ok=True)
    for combination in ("sum", "separate"):
        ours, theirs = (
            group_advantages(each, combination, global_std=False, clip_max=5.0) for each in (rewards, other)
        )
        torch.testing.assert_close(ours.values, theirs.values, atol=0, rtol=0)
        assert ours.values.isfinite().all()


@given(several(), st.data())
def test_counts_and_means_are_each_rewards_own_and_do_not_depend_on_the_cut(rewards, data):
    cut = data.draw(st.integers(0, len(rewards.prompt_id)))
    pieces = [
        replace(
            rewards,
            parts=rewards.parts[:, rows],
            parts_valid=rewards.parts_valid[:, rows],
            prompt_id=rewards.prompt_id[rows],
        )
        for rows in (slice(0, cut), slice(cut, None))
    ]
    joined = GlobalRewards.concatenate(pieces)
    assert torch.equal(joined.values, rewards.values) and torch.equal(joined.valid, rewards.valid)
    assert joined.failures() == rewards.failures()
    assert joined.means() == pytest.approx(rewards.means(), nan_ok=True)
    for row, name in enumerate(rewards.weights):
        kept = rewards.parts[row][rewards.parts_valid[row]]
        assert rewards.failures()[name] == len(rewards.prompt_id) - len(kept)
        assert rewards.means()[name] == pytest.approx(kept.mean().item(), abs=1e-5, nan_ok=True)


def test_a_run_without_any_reward_is_told_which_one_failed_and_why():
    parts, prompt_id = torch.zeros(2, 4), torch.zeros(4, dtype=torch.int64)
    weights, valid = {"ocr": 1.0, "judge": 1.0}, torch.ones(2, 4, dtype=torch.bool)
    GlobalRewards(weights, parts, valid, prompt_id).require_some()
    valid[1] = False
    with pytest.raises(UserError, match=r"every sample's reward failed \(judge\).*no answer"):
        GlobalRewards(weights, parts, valid, prompt_id, "no answer").require_some()


@pytest.fixture(scope="module")
def pool():
    with RewardPool(SLOW, 3, 10.0) as pool:
        yield pool


@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.02, 0.06]), min_size=12, max_size=12))
def test_values_do_not_depend_on_the_order_in_which_batches_are_finished(pool, delays):
    images = torch.zeros(12, 3, 4, 4, dtype=torch.uint8)
    images[:, 0] = torch.arange(12)[:, None, None]
    rows = [{"prompt": "", "seconds": seconds} for seconds in delays]
    pending = [pool.submit(images[i : i + 4], rows[i : i + 4]) for i in (0, 4, 8)]
    results = [each.result() for each in reversed(pending)][::-1]
    assert torch.cat([result.values for result in results]).tolist() == list(range(12))


# Whole runs


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model"))


def colours(folder: Path) -> Path:
    """The prompts of `arguments`, each with a colour for colour_match to look for."""
    path = folder / "colours.txt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{prompt} in red\n" for prompt in PROMPTS))
    return path


@pytest.mark.slow
def test_a_run_with_two_rewards_reports_each_and_their_weighted_sum(model, tmp_path):
    weights = ("brightness=0.7", "colour_match=0.3")
    prompts = colours(tmp_path)
    runs = {}
    for combination in ("sum", "separate"):
        folder = tmp_path / combination
        flags = {"train_iters": 2, "train_data": prompts, "eval_data": prompts}
        flags |= {"reward": weights, "reward_combination": combination}
        (outcome,) = launch(arguments(model, folder, **flags))
        assert outcome.status == 0, outcome.errors
        runs[combination] = metrics(folder)
        for row in runs[combination][1:]:
            total = 0.7 * row["reward/brightness_mean"] + 0.3 * row["reward/colour_match_mean"]
            assert row["train/reward_mean"] == pytest.approx(total, abs=1e-6)
            assert row["reward/failed"] == 0
            assert row["consistency/log_prob_abs_diff_max"] == 0
    one, other = runs["sum"][1], runs["separate"][1]
    assert one["train/reward_mean"] == other["train/reward_mean"]  # the same samples
    assert one["train/grad_norm"] != other["train/grad_norm"]  # other advantages
