"""Scores are waited for when they are needed, not before."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.state import initialize
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rollout.base import RolloutRequest, Trajectory
from megatron_omni.training.scoring import Scorer
from tests.distributed import run_distributed
from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.training.command_line import arguments, launch, metrics, reproducible


def brightness_when_told(images: np.ndarray, metadata: list[dict]) -> list[float]:
    """The brightness, once the file that the row names under "wait_for" is there."""
    for row in metadata:
        while "wait_for" in row and not Path(row["wait_for"]).exists():
            time.sleep(0.01)
    return (images.mean((1, 2, 3)) / 255).tolist()


def slow_brightness(images: np.ndarray, metadata: list[dict]) -> list[float]:
    time.sleep(0.2)
    return brightness_when_told(images, metadata)


def batch(prompt: int) -> Trajectory:
    """Two samples of a prompt."""
    none = torch.zeros(2, 0)
    images = torch.full((2, 3, 4, 4), 10 * prompt, dtype=torch.uint8)
    ids = torch.full((2,), prompt)
    return Trajectory(["p"] * 2, ids, ids, none, none, none, none, none, none, images, weight_version=0)


def collect_while_others_wait(mark: Path) -> list[tuple[list[int], list[float]]]:
    layout = initialize(ParallelConfig(), seed=0)
    scorer = Scorer(
        layout,
        {f"{__name__}:brightness_when_told": 2.0},
        lambda name: RewardPool(name, 2, 60.0, RewardOptions()),
    )
    for prompt in range(3):
        row = {"prompt": "p"} | ({"wait_for": str(mark)} if prompt else {})
        requests = [RolloutRequest(prompt, row, seed=0)] * 2
        scorer.submit(batch(prompt), requests)
    first = scorer.collect(2)
    assert not mark.exists()
    mark.touch()
    rest = scorer.collect(4)
    scorer.close()
    return [(part.prompt_id.tolist(), part.values.tolist()) for part in (first, rest)]


def test_the_first_samples_do_not_wait_for_the_others(tmp_path):
    (collected,) = run_distributed(collect_while_others_wait, 1, tmp_path / "mark", timeout=60)
    assert collected[0] == ([0, 0], [0.0, 0.0])
    assert collected[1][0] == [1, 1, 2, 2]
    assert collected[1][1] == pytest.approx([2 * 10 / 255] * 2 + [2 * 20 / 255] * 2)


@pytest.mark.parametrize(
    "flags", [{}, {"global_std": True}, {"rollout_batch_size": 1, "n_samples_per_prompt": 8}]
)
def test_a_slow_reward_changes_nothing_but_the_time(tmp_path, flags):
    model = tiny_pipeline_folder(tmp_path / "model")
    runs = []
    for name in ("brightness_when_told", "slow_brightness"):
        line = arguments(
            model,
            tmp_path / name,
            reward=f"{__name__}:{name}",
            updates_per_iteration=2,
            train_iters=2,
            **flags,
        )
        (outcome,) = launch(line)
        assert outcome.status == 0, outcome.errors
        runs.append(reproducible(metrics(tmp_path / name)))
    assert runs[0] == runs[1]
    assert runs[0][1]["train/grad_norm"] > 0
