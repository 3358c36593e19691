"""Samples of the in-place engine's parts, for what the server is asked."""

from pathlib import Path

import torch

from megatron_omni.config.schema import Config
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import initialize
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.sampling.sampler import Sampler
from megatron_omni.sampling.seeds import generator
from megatron_omni.sampling.step import stochastic_step
from megatron_omni.training.build import build_model


def in_place_samples(
    folders: list[Path], requests: list[SampleRequest]
) -> list[list[dict[str, torch.Tensor]]]:
    """For each model folder each request's tensors, under the names of the server's answer."""
    config = Config()
    layout = initialize(config.parallel, seed=0)
    family = MODELS.get("qwen_image")
    results = []
    for folder in folders:
        pipeline = family.open_pipeline(folder, layout.device, torch.float32)
        chunks = build_model(config, family, folder, layout)
        results.append([_sample(pipeline, chunks, request) for request in requests])
    return results


def _sample(pipeline, chunks: list[torch.nn.Module], request: SampleRequest) -> dict[str, torch.Tensor]:
    guidance = Guidance(request.true_cfg_scale)
    size = pipeline.latent_size(request.height, request.width)
    sigmas = pipeline.sigmas(request.num_inference_steps, size)
    embedding, negative = pipeline.encode_prompts([request.prompt, request.negative_prompt])
    noise = pipeline.initial_noise(generator(request.noise_seed, "initial"), size)[None]
    sampler = Sampler(request.sde_type, request.noise_level, sigmas, size, guidance)
    lane = sampler.sample(noise, [embedding], negative, [request.window], [request.trained], [request.seed])
    (path,) = ForwardPipeline(chunks, guidance.forward, torch.float32).run([lane])
    sample = {
        name: getattr(path, name)[0] for name in ("clean_latents", "latents", "next_latents", "log_probs")
    }
    sample["sigmas"], sample["next_sigmas"] = sigmas[path.steps[0]], sigmas[path.steps[0] + 1]
    sample["image"] = pipeline.decode_latents(path.clean_latents, size)[0]
    if request.record_means:
        sample["means"] = _means(chunks[0], guidance, request, sample, embedding, negative, size, sigmas)
    return sample


@torch.no_grad()
def _means(model, guidance, request, sample, embedding, negative, size, sigmas) -> torch.Tensor:
    inputs = guidance.inputs(
        sample["latents"], sample["sigmas"], [embedding] * len(request.trained), negative, size
    )
    velocity = guidance.combine(guidance.forward(model, inputs))
    return stochastic_step(
        sample["latents"],
        velocity,
        sample["sigmas"],
        sample["next_sigmas"],
        kind=request.sde_type,
        noise_level=request.noise_level,
        sigma_max=sigmas[1].item(),
        next_sample=sample["next_latents"],
    ).mean
