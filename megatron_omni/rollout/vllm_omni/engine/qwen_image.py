"""Qwen-Image in vLLM-Omni, sampling as the trainer's in-place engine does: same noise, step and guidance."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
from vllm_omni.diffusion.worker.utils import StepRequestState
from vllm_omni.errors import OmniClientError
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from megatron_omni.rollout.vllm_omni.engine.path import RecordedPath
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.sampling.seeds import generator
from megatron_omni.sampling.step import stochastic_step

TRANSFORMER = "transformer."
PATH = "recorded_path"


def sample_request(parameters: OmniDiffusionSamplingParams) -> SampleRequest:
    """What the server was asked; for vLLM-Omni's own run at start, which no one asked for, an ODE sample."""
    if "request" in parameters.extra_args:
        return SampleRequest(**parameters.extra_args["request"])
    return SampleRequest(
        prompt="",
        negative_prompt="",
        seed=0,
        noise_seed=0,
        height=parameters.height,
        width=parameters.width,
        num_inference_steps=parameters.num_inference_steps,
        sde_type="ode",
        noise_level=0.0,
        true_cfg_scale=1.0,
        window=(),
        trained=(),
    )


class QwenImageRollout(QwenImagePipeline):
    """vLLM-Omni's pipeline, run step by step. Latents are float32 whatever the model's dtype.

    Each request brings a `SampleRequest`, as a dictionary, under "request" in its `extra_args`.
    """

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)
        for network in (self.text_encoder, self.vae):
            if network.dtype != od_config.dtype:
                network.to(od_config.dtype)
        self.transformer_names: set[str] = set()
        """Names of the transformer's tensors in the model folder."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._noting_names(weights))

    def _noting_names(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if name.startswith(TRANSFORMER):
                self.transformer_names.add(name.removeprefix(TRANSFORMER))
            yield name, tensor

    def prepare_encode(self, state: StepRequestState, **kwargs: Any) -> StepRequestState:
        request = sample_request(state.sampling)
        pixels = 2 * self.vae_scale_factor
        if request.height % pixels or request.width % pixels:
            raise OmniClientError(
                f"image size {request.height}×{request.width}: both must be multiples of {pixels}."
            )
        state = super().prepare_encode(state, **kwargs)
        state.latents = self.initial_noise(request).to(self.device)
        state.timesteps = state.scheduler.sigmas[:-1].to(self.device)
        state.extra[PATH] = RecordedPath(request)
        return state

    def initial_noise(self, request: SampleRequest) -> Tensor:
        """[1, N, C] float32 on the CPU, as diffusers draws it."""
        channels = self.transformer.in_channels // 4
        height, width = request.height // self.vae_scale_factor, request.width // self.vae_scale_factor
        noise = torch.randn(1, channels, height, width, generator=generator(request.noise_seed, "initial"))
        return self._pack_latents(noise, 1, channels, height, width)

    def _build_denoise_kwargs(self, latents: Tensor, timestep: Tensor, **kwargs: Any) -> tuple:
        """Hands latents [B, N, C] and sigma [B], both float32, to the model in its dtype.

        diffusers rounds 1000 sigma instead of sigma; that makes another bfloat16 number.
        """
        dtype = self.od_config.dtype
        positive, negative, output_slice = super()._build_denoise_kwargs(
            latents.to(dtype), timestep, **kwargs
        )
        for branch in filter(None, (positive, negative)):
            branch["timestep"] = timestep.to(dtype)
        return positive, negative, output_slice

    def combine_cfg_noise(
        self,
        positive_noise_pred: tuple[Tensor],
        negative_noise_pred: tuple[Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Guidance in float32, as `megatron_omni.sampling.guidance.Guidance.combine`."""
        return super().combine_cfg_noise(
            positive_noise_pred[0].float(), negative_noise_pred[0].float(), *args, **kwargs
        )

    def step_scheduler(self, state: StepRequestState, noise_pred: Tensor, **kwargs: Any) -> None:
        """One step of one sample: velocity [1, N, C]."""
        path: RecordedPath = state.extra[PATH]
        request, i, sigmas = path.request, state.step_index, state.scheduler.sigmas
        latents, sigma, sigma_next = state.latents, sigmas[i].item(), sigmas[i + 1].item()
        if i in request.window:
            noise = torch.randn(latents.shape[1:], generator=generator(request.seed, "step", i))
            step = stochastic_step(
                latents,
                noise_pred,
                sigma,
                sigma_next,
                kind=request.sde_type,
                noise_level=request.noise_level,
                sigma_max=sigmas[1].item(),
                noise=noise[None].to(latents.device),
            )
        else:
            step = stochastic_step(latents, noise_pred, sigma, sigma_next, kind="ode", noise_level=0.0)
        if i in request.trained:
            path.record(latents, step, sigma, sigma_next)
        state.latents = step.next_sample
        state.step_index += 1

    def post_decode(self, state: StepRequestState, **kwargs: Any) -> DiffusionOutput:
        output = super().post_decode(state, **kwargs)
        output.trajectory_latents, output.trajectory_timesteps, output.trajectory_log_probs = state.extra[
            PATH
        ].trajectory(state.latents[0])
        return output
