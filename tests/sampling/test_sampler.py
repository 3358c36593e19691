"""The denoising loop: against diffusers' scheduler, and independent of batches."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from megatron_omni.models.base import TextCondition
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.sampling.sampler import SampledPath, Sampler
from megatron_omni.sampling.step import stochastic_step
from tests.toy import SIZE, ToyModel, embeddings, noise, run_lane

STEPS = 6
SIGMAS = torch.cat([torch.linspace(1, 1 / STEPS, STEPS), torch.zeros(1)])


def draw(rows: list[int], windows=None, recorded=None, scale=1.0, kind="sde", negative_seed=9) -> SampledPath:
    windows = windows or [(0, 1, 3)] * 4
    recorded = recorded or windows
    sampler = Sampler(kind, 0.7, SIGMAS, SIZE, Guidance(scale))
    lane = sampler.sample(
        noise(4)[rows],
        [embeddings(4)[i] for i in rows],
        embeddings(1, negative_seed)[0],
        [windows[i] for i in rows],
        [recorded[i] for i in rows],
        [100 + i for i in rows],
    )
    return run_lane(lane, ToyModel(), Guidance(scale))


def test_without_stochastic_steps_it_is_diffusers_euler_sampler():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS))
    model, condition, x = ToyModel(), TextCondition.pad(embeddings(4)), noise(4)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(model(x, t.expand(4) / 1000, condition, SIZE), t, x, return_dict=False)[0]
    path = draw([0, 1, 2, 3], windows=[()] * 4)
    torch.testing.assert_close(path.clean_latents, x, atol=1e-5, rtol=1e-5)
    assert path.latents.shape == (4, 0, 6, 4)


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_batch_is_its_samples_one_by_one(scale):
    windows, recorded = [(0, 1), (2, 3), (0, 4), (1, 2)], [(0,), (3,), (4,), (1,)]
    together = draw([0, 1, 2, 3], windows, recorded, scale)
    for i in range(4):
        alone = draw([i], windows, recorded, scale)
        for name in ("clean_latents", "latents", "next_latents", "log_probs", "steps"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(together, name)[i])


def test_recorded_steps_are_links_of_one_chain():
    window = tuple(range(STEPS - 1))
    path = draw([0, 1], [window] * 4)
    assert torch.equal(path.next_latents[:, :-1], path.latents[:, 1:])
    assert torch.equal(path.latents[:, 0], noise(4)[:2])
    assert path.steps.tolist() == [list(window)] * 2


def test_log_probs_are_those_of_the_recorded_steps():
    path = draw([0, 1, 2], scale=3.0)
    guidance, model, negative = Guidance(3.0), ToyModel(), embeddings(1, 9)[0]
    for slot in range(3):
        sigma, sigma_next = SIGMAS[path.steps[:, slot]], SIGMAS[path.steps[:, slot] + 1]
        inputs = guidance.inputs(path.latents[:, slot], sigma, embeddings(4)[:3], negative, SIZE)
        step = stochastic_step(
            path.latents[:, slot],
            guidance.combine(guidance.forward(model, inputs)),
            sigma,
            sigma_next,
            kind="sde",
            noise_level=0.7,
            sigma_max=SIGMAS[1].item(),
            next_sample=path.next_latents[:, slot],
        )
        assert torch.equal(step.log_prob, path.log_probs[:, slot])


def test_members_with_equal_noise_and_different_seeds_differ():
    sampler = Sampler("sde", 0.7, SIGMAS, SIZE, Guidance())
    same = noise(1).expand(2, -1, -1)
    lane = sampler.sample(same, embeddings(1) * 2, embeddings(1)[0], [(0,)] * 2, [(0,)] * 2, [1, 2])
    path = run_lane(lane, ToyModel())
    assert not torch.equal(path.clean_latents[0], path.clean_latents[1])


def test_guidance_off_ignores_the_negative_prompt_and_on_does_not():
    assert torch.equal(draw([0], negative_seed=1).clean_latents, draw([0], negative_seed=2).clean_latents)
    assert not torch.equal(
        draw([0], scale=2.0, negative_seed=1).clean_latents,
        draw([0], scale=2.0, negative_seed=2).clean_latents,
    )
