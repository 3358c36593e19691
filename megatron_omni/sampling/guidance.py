"""Classifier-free guidance as one batched forward pass, shared by sampling and training."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_omni.models.base import DiffusionModel, ImageSize, TextCondition


@dataclass(frozen=True)
class ModelInput:
    """What one forward pass of the model takes. With guidance, the unguided branch stands second."""

    latents: Tensor
    sigma: Tensor
    condition: TextCondition
    size: ImageSize


@dataclass(frozen=True)
class Guidance:
    """Qwen-Image's true CFG: u = neg + s·(pos − neg), rescaled token by token to the norm of pos."""

    scale: float = 1.0
    batch_invariant: bool = False
    """Run the model on one row at a time: a row's value then cannot depend on its batch."""

    @property
    def enabled(self) -> bool:
        return self.scale != 1.0

    def inputs(
        self, latents: Tensor, sigma: Tensor, embeddings: list[Tensor], negative: Tensor, size: ImageSize
    ) -> ModelInput:
        """latents [B, N, C], sigma [B], embeddings B × [T_i, D], negative [T, D]."""
        if self.enabled:
            embeddings = embeddings + [negative] * len(embeddings)
            latents, sigma = torch.cat([latents, latents]), torch.cat([sigma, sigma])
        return ModelInput(latents, sigma, TextCondition.pad(embeddings), size)

    def forward(self, model: DiffusionModel, inputs: ModelInput) -> Tensor:
        """The model's raw output on all rows of `inputs`."""
        if not self.batch_invariant:
            return model(inputs.latents, inputs.sigma, inputs.condition, inputs.size)
        rows = []
        for i, mask in enumerate(inputs.condition.mask):
            row = slice(i, i + 1)
            embeddings = inputs.condition.embeddings[row, : int(mask.sum())]
            condition = TextCondition.pad(list(embeddings))
            rows.append(model(inputs.latents[row], inputs.sigma[row], condition, inputs.size))
        return torch.cat(rows)

    def combine(self, output: Tensor) -> Tensor:
        """Guided velocity [B, N, C] float32 from the model's raw output."""
        output = output.float()
        if not self.enabled:
            return output
        positive, negative = output.chunk(2)
        guided = negative + self.scale * (positive - negative)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
