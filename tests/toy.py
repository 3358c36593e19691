"""A diffusion model of a few numbers, for tests of everything that knows no model."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.parallel.pipeline import Lane
from megatron_omni.sampling.guidance import Guidance

Result = TypeVar("Result")

SIZE = ImageSize(2, 3)
CHANNELS = 4
TEXT_CHANNELS = 5


UNGUIDED = Guidance()


class ToyModel(nn.Module):
    """A velocity that depends on the latents, on sigma and on the real tokens of the prompt."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.latents = nn.Linear(CHANNELS, CHANNELS)
        self.text = nn.Linear(TEXT_CHANNELS, CHANNELS)

    def forward(self, latents: Tensor, sigma: Tensor, condition: TextCondition, size: ImageSize) -> Tensor:
        assert latents.shape[1] == size.height * size.width
        text = (self.text(condition.embeddings) * condition.mask[..., None]).sum(1, keepdim=True)
        return torch.tanh(self.latents(latents) + text) * (1 + sigma[:, None, None])


def run_lane(lane: Lane[Result], model: ToyModel, guidance: Guidance = UNGUIDED) -> Result:
    """The lane's result, with the model on one process."""
    try:
        inputs = next(lane)
        while True:
            inputs = lane.send(guidance.forward(model, inputs))
    except StopIteration as end:
        return end.value


def embeddings(count: int, seed: int = 0) -> list[Tensor]:
    """One of unequal length for each of `count` prompts."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(2 + i % 3, TEXT_CHANNELS, generator=random) for i in range(count)]


def noise(count: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, SIZE.height * SIZE.width, CHANNELS, generator=random)
