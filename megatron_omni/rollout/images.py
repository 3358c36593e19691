"""Pictures from disk in the place of samples: the "rollout" of supervised training."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_omni.cache import BatchCache
from megatron_omni.data.images import ImageSet
from megatron_omni.rollout.base import MicroBatchEngine, RolloutRequest, Trajectory
from megatron_omni.rollout.parts import EngineParts

CACHED_IMAGES = 32768


class ImageEngine(MicroBatchEngine):
    """Encodes the picture that each request's metadata names under "image"; each is encoded once."""

    samples_policy = False

    def __init__(self, parts: EngineParts):
        config = parts.config
        super().__init__(config.training.micro_batch_size)
        self.pipeline = parts.pipeline
        self.images = ImageSet.from_file(config.data.train_data, config.rollout.height, config.rollout.width)
        self.rows = {row.metadata["image"]: row for row in self.images.prompts.rows}
        self.latents = BatchCache(self._encode, CACHED_IMAGES)

    def _encode(self, names: list[str]) -> list[Tensor]:
        return list(self.pipeline.encode_images(self.images.load([self.rows[name] for name in names])))

    def draw(self, micro_batches: Iterable[list[RolloutRequest]]) -> Iterator[Trajectory]:
        return map(self._trajectory, micro_batches)

    def _trajectory(self, requests: list[RolloutRequest]) -> Trajectory:
        clean = torch.stack(self.latents([request.metadata["image"] for request in requests]))
        none = clean.new_empty(len(clean), 0)
        no_steps = clean.new_empty(len(clean), 0, *clean.shape[1:])
        return Trajectory(
            prompts=[request.prompt for request in requests],
            prompt_id=torch.tensor([request.prompt_id for request in requests]),
            seeds=torch.tensor([request.seed for request in requests]),
            clean_latents=clean,
            latents=no_steps,
            next_latents=no_steps,
            sigmas=none,
            next_sigmas=none,
            log_probs=none,
            images=torch.empty(len(clean), 3, 0, 0, dtype=torch.uint8),
            weight_version=self.weight_version,
        )
