import numpy as np
import pytest

from megatron_omni.errors import UserError
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.registry import REWARDS, build_reward


def flat(*colours: tuple[int, int, int]) -> np.ndarray:
    return np.stack([np.full((4, 6, 3), colour, np.uint8) for colour in colours])


def test_brightness_goes_from_black_to_white():
    scores = build_reward("brightness", RewardOptions()).score(
        flat((0, 0, 0), (51, 51, 51), (255, 255, 255)), [{}] * 3
    )
    assert scores == pytest.approx([0, 0.2, 1])


def test_colour_match_is_one_for_the_named_colour_and_zero_for_its_opposite():
    images = flat((255, 0, 0), (0, 255, 255), (255, 0, 0))
    prompts = [{"prompt": "a red wall"}, {"prompt": "A RED wall"}, {"prompt": "a coloured, blue wall"}]
    assert build_reward("colour_match", RewardOptions()).score(images, prompts) == pytest.approx(
        [1, 0, 1 / 3]
    )


def test_colour_match_refuses_a_prompt_without_colour():
    with pytest.raises(UserError, match="'a wall'"):
        build_reward("colour_match", RewardOptions()).check_prompt({"prompt": "a wall"})


@pytest.mark.parametrize("name", sorted(REWARDS.paths))
def test_every_registered_reward_can_be_built(name):
    build_reward(name, RewardOptions())
