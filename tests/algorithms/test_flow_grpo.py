"""Flow-GRPO from requests to gradients, on a toy model."""

import math
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from megatron_omni.algorithms.base import Loss, TrainingBatch
from megatron_omni.algorithms.flow_grpo import FlowGrpo
from megatron_omni.config.schema import Config
from megatron_omni.rewards.combination import GlobalRewards
from megatron_omni.rollout.base import Trajectory
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.sampling.sampler import Sampler
from tests.toy import SIZE, ToyModel, embeddings, noise, run_lane

STEPS = 6
SIGMAS = torch.cat([torch.linspace(1, 1 / STEPS, STEPS), torch.zeros(1)])
GROUPS, MEMBERS = 2, 4


def build(**settings) -> FlowGrpo:
    config = Config()
    config.rollout.num_inference_steps = STEPS
    config.rollout.n_samples_per_prompt = MEMBERS
    config.algorithm.clip_range = 1e-3
    for name, value in settings.items():
        group = next(g for g in (config.rollout, config.algorithm, config.training) if hasattr(g, name))
        setattr(group, name, value)
    return FlowGrpo(config, SIGMAS)


def rollout(algorithm: FlowGrpo, model: ToyModel, iteration: int = 0) -> Trajectory:
    requests = algorithm.requests(iteration, [{"prompt": str(i)} for i in range(GROUPS)], first=0)
    sampler = Sampler(algorithm.rollout.sde_type, 0.7, SIGMAS, SIZE, Guidance())
    lane = sampler.sample(
        noise(len(requests)),
        [embeddings(GROUPS)[r.prompt_id] for r in requests],
        embeddings(1)[0],
        [r.window for r in requests],
        [r.trained for r in requests],
        [r.seed for r in requests],
    )
    path = run_lane(lane, model)
    return Trajectory(
        prompts=[r.prompt for r in requests],
        prompt_id=torch.tensor([r.prompt_id for r in requests]),
        seeds=torch.tensor([r.seed for r in requests]),
        clean_latents=path.clean_latents,
        latents=path.latents,
        next_latents=path.next_latents,
        sigmas=SIGMAS[path.steps],
        next_sigmas=SIGMAS[path.steps + 1],
        log_probs=path.log_probs,
        images=torch.zeros(len(requests), 3, 1, 1, dtype=torch.uint8),
        weight_version=0,
        old_log_probs=path.log_probs,
    )


def velocity(model: ToyModel, batch: TrainingBatch) -> Tensor:
    conditions = [embeddings(GROUPS)[int(prompt)] for prompt in batch.prompts]
    inputs = Guidance().inputs(batch.latents, batch.sigma, conditions, embeddings(1)[0], SIZE)
    return Guidance().combine(Guidance().forward(model, inputs))


def advantages_of(algorithm: FlowGrpo, trajectory: Trajectory, valid=None):
    rewards = torch.randn(len(trajectory), generator=torch.Generator().manual_seed(3))
    valid = torch.ones(len(trajectory), dtype=torch.bool) if valid is None else valid
    return algorithm.advantages(
        GlobalRewards({"reward": 1.0}, rewards[None], valid[None], trajectory.prompt_id)
    )


def losses(algorithm, model, trajectory, advantages, size) -> list[Loss]:
    batches = algorithm.micro_batches(trajectory, advantages, size, iteration=0)
    return [algorithm.loss(batch, velocity(model, batch)) for batch in batches]


@pytest.mark.parametrize("kind", ["sde", "dance", "cps"])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_replay_with_unchanged_weights_gives_ratio_one(kind, size):
    algorithm, model = build(sde_type=kind), ToyModel()
    trajectory = rollout(algorithm, model)
    for loss in losses(algorithm, model, trajectory, advantages_of(algorithm, trajectory), size):
        tolerance = 0.0 if size == 8 else 1e-6
        assert loss.maxima["consistency/log_prob_abs_diff_max"] <= tolerance
        assert loss.maxima["consistency/ratio_abs_dev_max"] <= tolerance
        assert loss.means["train/clip_fraction"] == 0
        assert all(value.isfinite() for value in (loss.means | loss.maxima).values())


def test_without_old_log_probabilities_the_ratio_is_one_and_the_difference_is_the_engines():
    algorithm, model = build(clip_range=1e-5), ToyModel()
    trajectory = rollout(algorithm, model)
    trajectory.log_probs = trajectory.log_probs + 0.25  # an engine that computes otherwise
    trajectory.old_log_probs = None
    advantages = advantages_of(algorithm, trajectory)
    for batch in algorithm.micro_batches(trajectory, advantages, 8, iteration=0):
        model.zero_grad()
        predicted = velocity(model, batch)
        loss = algorithm.loss(batch, predicted)
        gradient = torch.autograd.grad(loss.value, list(model.parameters()), retain_graph=True)
        policy_gradient = -(batch.advantages * algorithm.log_prob(batch, predicted)).mean()
        torch.testing.assert_close(gradient, torch.autograd.grad(policy_gradient, list(model.parameters())))
        assert loss.means["train/clip_fraction"] == 0
        assert loss.means["consistency/log_prob_abs_diff_mean"] == pytest.approx(0.25, rel=1e-4)
        assert loss.maxima["consistency/ratio_abs_dev_max"] == pytest.approx(1 - math.exp(-0.25), rel=1e-3)


def test_accumulated_gradient_is_the_gradient_of_the_whole_batch():
    algorithm, model = build(), ToyModel()
    trajectory = rollout(algorithm, model)
    advantages = advantages_of(algorithm, trajectory)
    moved = ToyModel(seed=1)
    whole = algorithm.micro_batches(trajectory, advantages, len(trajectory), 0)
    gradients = []
    for size in (1, 2, 8):
        moved.zero_grad()
        parts = losses(algorithm, moved, trajectory, advantages, size)
        assert len(parts) == len(whole) * 8 // size
        for loss in parts:
            (loss.value / len(parts)).backward()
        gradients.append([p.grad.clone() for p in moved.parameters()])
    for gradient in gradients[:-1]:
        torch.testing.assert_close(gradient, gradients[-1], atol=1e-6, rtol=1e-4)


def test_advantages_do_not_depend_on_the_number_of_trained_steps():
    few, many = build(timestep_fraction=0.2), build(timestep_fraction=1.0)
    model = ToyModel()
    one, two = (advantages_of(a, rollout(a, model)) for a in (few, many))
    assert torch.equal(one.values, two.values)
    assert one.values.shape == (GROUPS * MEMBERS,)


def test_the_window_is_shared_inside_a_group_and_drawn_anew_for_each():
    algorithm = build(sde_window_size=2, sde_window_range=(0, 5))
    seen = set()
    for iteration in range(20):
        requests = algorithm.requests(iteration, [{"prompt": "a"}, {"prompt": "b"}], first=0)
        for group in (requests[:MEMBERS], requests[MEMBERS:]):
            assert len({r.window for r in group}) == len({r.trained for r in group}) == 1
            seen.add(group[0].window)
    assert seen == {(0, 1), (1, 2), (2, 3), (3, 4)}


def test_seeds_are_distinct_over_processes_and_do_not_depend_on_their_number():
    algorithm = build()
    rows = [{"prompt": str(i)} for i in range(6)]
    whole = algorithm.requests(3, rows, first=0)
    split = algorithm.requests(3, rows[:3], first=0) + algorithm.requests(3, rows[3:], first=3)
    assert whole == split
    assert len({r.seed for r in whole}) == 6 * MEMBERS


def test_a_failed_sample_leaves_no_trace_in_the_gradient():
    algorithm, model, moved = build(), ToyModel(), ToyModel(seed=1)
    trajectory = rollout(algorithm, model)
    valid = torch.ones(len(trajectory), dtype=torch.bool)
    valid[2] = False
    advantages = advantages_of(algorithm, trajectory, valid)

    def gradient() -> list[Tensor]:
        moved.zero_grad()
        for loss in losses(algorithm, moved, trajectory, advantages, 8):
            loss.value.backward()
        return [p.grad.clone() for p in moved.parameters()]

    before = gradient()
    trajectory.old_log_probs[2] += 7.0
    torch.testing.assert_close(gradient(), before, atol=0, rtol=0)


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_updates_share_the_samples_without_loss(updates):
    algorithm = build()
    trajectory = rollout(algorithm, ToyModel())
    advantages, size = advantages_of(algorithm, trajectory), len(trajectory) // updates
    shares = [
        algorithm.micro_batches(trajectory.rows(i, i + size), advantages.rows(i, i + size), 2, 0)
        for i in range(0, len(trajectory), size)
    ]
    assert len(shares) == updates
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    seen = torch.cat([torch.stack([batch.log_prob, batch.advantages], 1) for batch in batches])
    values = advantages.values[:, None].expand_as(trajectory.log_probs)
    sampled = torch.stack([trajectory.log_probs, values], -1).flatten(0, 1)
    assert sorted(seen.tolist()) == sorted(sampled.tolist())


def test_kl_to_the_reference_pulls_back_and_is_zero_at_the_start():
    algorithm, model = build(kl_coefficient=0.5), ToyModel()
    assert algorithm.needs_reference
    trajectory = rollout(algorithm, model)
    batch = algorithm.micro_batches(trajectory, advantages_of(algorithm, trajectory), 8, 0)[0]
    batch.reference_velocity = velocity(model, batch).detach()
    assert algorithm.loss(batch, velocity(model, batch)).means["train/kl"] == 0
    moved = algorithm.loss(batch, velocity(ToyModel(seed=1), batch))
    assert moved.means["train/kl"] > 0
    batch.advantages = torch.zeros(8)
    only_kl = algorithm.loss(batch, velocity(ToyModel(seed=1), batch))
    torch.testing.assert_close(only_kl.value, 0.5 * only_kl.means["train/kl"])


def test_rows_and_concatenation_keep_every_field():
    trajectory = rollout(build(), ToyModel())
    joined = Trajectory.concatenate([trajectory.rows(0, 3), trajectory.rows(3, 8)])
    for f in fields(trajectory):
        whole, again = getattr(trajectory, f.name), getattr(joined, f.name)
        assert torch.equal(whole, again) if isinstance(whole, Tensor) else whole == again
