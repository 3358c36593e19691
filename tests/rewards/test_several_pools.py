"""Several rewards of the same samples, each scored by processes of its own."""

import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_omni.errors import UserError
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rollout.base import RolloutRequest
from megatron_omni.training.scoring import Scorer
from tests.rewards.judge_server import JudgeServer, Reply, options, picture, score

MISHAPS = "tests.rewards.example_rewards:first_pixel"
ALONE = SimpleNamespace(
    leads_replica=True, gather_data_parallel=lambda x: x, broadcast_in_replica=lambda x: x
)


def scorer(weights: dict[str, float], url: str = "http://127.0.0.1:9/v1") -> Scorer:
    return Scorer(ALONE, weights, lambda name: RewardPool(name, 1, 10.0, options(url)))


def submit(scorer: Scorer, first: int, count: int, **mishaps: str) -> None:
    """Images with red values `first` and on, two samples a prompt."""
    images = torch.zeros(count, 3, 4, 4, dtype=torch.uint8)
    images[:, 0] = torch.arange(first, first + count)[:, None, None]
    rows = [{"prompt": "a red wall"} for _ in range(count)]
    for index, mishap in mishaps.items():
        rows[int(index[1:])]["do"] = mishap
    prompt_id = torch.arange(first, first + count) // 2
    requests = [RolloutRequest(int(i), row, 0) for i, row in zip(prompt_id, rows, strict=True)]
    scorer.submit(SimpleNamespace(images=images, prompt_id=prompt_id), requests)


def test_parts_and_their_weighted_sum_come_in_the_order_of_the_samples():
    def script(request):
        return score(10 - int(picture(request)[0, 0, 0]))

    with JudgeServer(script) as server:
        both = scorer({MISHAPS: 0.5, "judge_score": 2.0}, server.url)
        both.check_prompts([{"prompt": "a red wall"}])
        for first in (0, 4):
            submit(both, first, 4)
        rewards = both.collect()
        both.close()
    assert rewards.parts[0].tolist() == list(range(8))
    assert rewards.parts[1].tolist() == pytest.approx([1 - i / 10 for i in range(8)])
    assert rewards.values.tolist() == pytest.approx([0.5 * i + 2 * (1 - i / 10) for i in range(8)])
    assert rewards.prompt_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rewards.valid.all() and rewards.failed == 0 and rewards.error == ""


def test_a_sample_that_one_reward_fails_on_is_invalid_and_counted_by_reward():
    def script(request):
        red = int(picture(request)[0, 0, 0])
        return Reply("garbage") if red in (1, 2) else score(red)

    with JudgeServer(script) as server:
        both = scorer({MISHAPS: 1.0, "judge_score": 1.0}, server.url)
        submit(both, 0, 6, _2="raise")
        rewards = both.collect()
        both.close()
    assert rewards.valid.tolist() == [True, False, False, True, True, True]
    assert rewards.failures() == {MISHAPS: 1, "judge_score": 2}
    assert "garbage" in rewards.error


def test_a_slow_judge_does_not_hold_up_the_other_reward():
    held = threading.Event()

    def script(_):
        held.wait(30)
        return score(5)

    with JudgeServer(script) as server:
        both = scorer({"judge_score": 1.0, "brightness": 1.0}, server.url)
        submit(both, 0, 4)
        slow, fast = both._pending[0].rewards
        fast.result()
        assert not slow.done()
        held.set()
        assert both.collect().valid.all()
        both.close()


def test_rewards_that_fail_on_every_sample_between_them_are_an_error():
    both = scorer({MISHAPS: 1.0, "tests.rewards.example_rewards:other_pixel": 1.0})
    submit(both, 0, 4, _0="raise", _1="raise", _2="other", _3="other")
    rewards = both.collect()
    both.close()
    with pytest.raises(UserError, match="one reward or another"):
        rewards.require_some()


def test_if_one_reward_cannot_be_built_the_others_end():
    opened = []

    def open_pool(name):
        opened.append(RewardPool(name, 1, 10.0))
        return opened[-1]

    with pytest.raises(UserError, match="unknown reward 'nonsuch'"):
        Scorer(ALONE, {"brightness": 1.0, "nonsuch": 1.0}, open_pool)
    assert all(worker.process.ended() for pool in opened for worker in pool._workers)
