"""Flow-GRPO written straight on diffusers' pipeline, with torch alone: what the engine is measured against.

After the loop of the method's authors (arXiv 2505.05470, their `train_sd3.py`): sample, score beside it in a
thread, update. It shares no code with the engine but the reward.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor

from megatron_omni.config.schema import Config
from megatron_omni.rewards.ocr import OcrReward

Text = tuple[Tensor, Tensor | None]
"""Embeddings [B, T, D] and mask [B, T] of a batch; no mask where nothing is padded."""


@dataclass(frozen=True)
class Outcome:
    """Seconds by phase, and what the iteration computed."""

    rollout: float
    reward: float
    """Waited for rewards once all samples were drawn."""
    update: float
    reward_mean: float
    grad_norm: float
    """Before clipping, of the first update."""


@dataclass(frozen=True)
class Sample:
    """What to draw: one image."""

    prompt: str
    trained: tuple[int, ...]
    """Steps whose loss is taken."""


@dataclass(frozen=True)
class Drawn:
    """A micro-batch of B samples along T stochastic steps."""

    text: Text
    latents: Tensor
    """[B, T + 1, N, C]."""
    log_probs: Tensor
    """[B, T]."""
    reward: Future[list[float]]


NoiseSource = Callable[[slice, int | None], Tensor]
"""Noise [B, N, C] of these samples at this step; None is the initial noise."""


class DiffusersLoop:
    """The pipeline's own transformer in training."""

    def __init__(self, config: Config):
        self.rollout, self.settings = config.rollout, config.algorithm
        self.micro_batch_size = config.training.micro_batch_size
        self.clip_grad = config.optimizer.clip_grad
        self.pipe = QwenImagePipeline.from_pretrained(config.model.model_path, low_cpu_mem_usage=False)
        self.pipe.vae.requires_grad_(False)
        self.pipe.text_encoder.requires_grad_(False)
        self.transformer = self.pipe.transformer
        self.parameters = list(self.transformer.parameters())
        adam = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
            weight_decay=adam.weight_decay,
        )
        stride = 2 * self.pipe.vae_scale_factor
        self.grid = (1, self.rollout.height // stride, self.rollout.width // stride)
        self.sigmas = self._schedule()
        self.reward = OcrReward()
        self.scoring = ThreadPoolExecutor(1)

    def iterate(self, samples: list[Sample], updates: int, noise: NoiseSource | None = None) -> Outcome:
        """Draws and scores `samples`, group by group, then takes `updates` optimizer steps."""
        noise = noise or self._fresh_noise
        times = [time.perf_counter()]
        rows = [
            slice(start, start + self.micro_batch_size)
            for start in range(0, len(samples), self.micro_batch_size)
        ]
        with torch.no_grad():
            negative = self.pipe.encode_prompt([self.rollout.negative_prompt])[0]
            drawn = [self._draw(samples[part], part, negative, noise) for part in rows]
        times.append(time.perf_counter())
        rewards = torch.tensor([value for batch in drawn for value in batch.reward.result()])
        times.append(time.perf_counter())
        advantages = self._advantages(rewards)
        share = len(rows) // updates
        norms = []
        for first in range(0, len(rows), share):
            for batch, part in zip(drawn[first : first + share], rows[first : first + share], strict=True):
                trained = torch.tensor([sample.trained for sample in samples[part]])
                for slot in trained.unbind(1):
                    loss = self._loss(batch, slot, advantages[part], negative)
                    (loss / (share * trained.shape[1])).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(self.parameters, self.clip_grad))
            self.optimizer.step()
            self.optimizer.zero_grad()
        times.append(time.perf_counter())
        return Outcome(*np.diff(times).tolist(), rewards.mean().item(), norms[0].item())

    def _draw(self, samples: list[Sample], rows: slice, negative: Tensor, noise: NoiseSource) -> Drawn:
        prompts = [sample.prompt for sample in samples]
        text = self._encode(prompts)
        x = noise(rows, None)
        latents, log_probs = [x], []
        steps = len(self.sigmas) - 1
        for i in range(steps):
            step = torch.full((len(samples),), i)
            velocity = self._velocity(x, self.sigmas[step], text, negative)
            if i == steps - 1:
                x = x + velocity * (self.sigmas[i + 1] - self.sigmas[i])
            else:
                mean, std = self._step(x, velocity, step)
                x = mean + std * noise(rows, i)
                latents.append(x)
                log_probs.append(log_density(x, mean, std))
        images = (self._decode(x) * 255).round().astype(np.uint8)
        reward = self.scoring.submit(self.reward.score, images, [{"prompt": prompt} for prompt in prompts])
        return Drawn(text, torch.stack(latents, 1), torch.stack(log_probs, 1), reward)

    def _encode(self, prompts: list[str]) -> Text:
        """Each prompt once, repeated for its samples."""
        distinct = list(dict.fromkeys(prompts))
        embeddings, mask = self.pipe.encode_prompt(distinct)
        index = torch.tensor([distinct.index(prompt) for prompt in prompts])
        return embeddings[index], None if mask is None else mask[index]

    def _velocity(self, x: Tensor, sigma: Tensor, text: Text, negative: Tensor) -> Tensor:
        positive = self._predict(x, sigma, text)
        if self.rollout.true_cfg_scale == 1:
            return positive
        unguided = self._predict(x, sigma, (negative.expand(len(x), -1, -1), None))
        guided = unguided + self.rollout.true_cfg_scale * (positive - unguided)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def _predict(self, x: Tensor, sigma: Tensor, text: Text) -> Tensor:
        embeddings, mask = text
        return self.transformer(
            hidden_states=x,
            timestep=sigma,
            encoder_hidden_states=embeddings,
            encoder_hidden_states_mask=mask,
            img_shapes=[[self.grid]] * len(x),
            return_dict=False,
        )[0]

    def _step(self, x: Tensor, velocity: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the stochastic step number `step` [B]."""
        sigma = self.sigmas[step].view(-1, 1, 1)
        dt = self.sigmas[step + 1].view(-1, 1, 1) - sigma
        scale = (
            sigma / (1 - torch.where(sigma == 1, self.sigmas[1], sigma))
        ).sqrt() * self.rollout.noise_level
        drift = scale**2 / (2 * sigma)
        return x * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt, scale * (-dt).sqrt()

    def _loss(self, batch: Drawn, step: Tensor, advantages: Tensor, negative: Tensor) -> Tensor:
        row = torch.arange(len(step))
        x = batch.latents[row, step]
        mean, std = self._step(x, self._velocity(x, self.sigmas[step], batch.text, negative), step)
        log_prob = log_density(batch.latents[row, step + 1], mean, std)
        ratio = (log_prob - batch.log_probs[row, step]).exp()
        bounded = ratio.clamp(1 - self.settings.clip_range, 1 + self.settings.clip_range)
        return torch.maximum(-advantages * ratio, -advantages * bounded).mean()

    def _advantages(self, rewards: Tensor) -> Tensor:
        groups = rewards.view(-1, self.rollout.n_samples_per_prompt)
        values = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        return values.flatten().clamp(-self.settings.adv_clip_max, self.settings.adv_clip_max)

    def _decode(self, x: Tensor) -> np.ndarray:
        """[B, H, W, 3] in [0, 1]."""
        vae = self.pipe.vae
        latents = self.pipe._unpack_latents(
            x, self.rollout.height, self.rollout.width, self.pipe.vae_scale_factor
        )
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        images = vae.decode(latents * std + mean, return_dict=False)[0][:, :, 0]
        return self.pipe.image_processor.postprocess(images, output_type="np")

    def _fresh_noise(self, rows: slice, step: int | None) -> Tensor:
        count = rows.stop - rows.start
        return torch.randn(count, self.grid[1] * self.grid[2], self.transformer.config.in_channels)

    def _schedule(self) -> Tensor:
        """[steps + 1], as the pipeline sets it."""
        steps, config = self.rollout.num_inference_steps, self.pipe.scheduler.config
        mu = calculate_shift(
            self.grid[1] * self.grid[2],
            config.base_image_seq_len,
            config.max_image_seq_len,
            config.base_shift,
            config.max_shift,
        )
        self.pipe.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        return self.pipe.scheduler.sigmas


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B], of the Gaussian step, as a mean over the other dimensions."""
    density = -((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return density.mean((1, 2))
