"""One optimizer step: micro-batches through Megatron's schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_omni.algorithms.base import Algorithm, Loss, TrainingBatch
from megatron_omni.cache import BatchCache
from megatron_omni.models.base import DiffusionModel, ImageSize
from megatron_omni.sampling.guidance import Guidance, ModelInput
from megatron_omni.training.optimizer import Optimization


@dataclass(frozen=True)
class UpdateResult:
    """What one optimizer step reports, for this process."""

    means: dict[str, float]
    maxima: dict[str, float]


class Updater:
    """Turns micro-batches into optimizer steps."""

    def __init__(
        self,
        optimization: Optimization,
        algorithm: Algorithm,
        guidance: Guidance,
        embeddings: BatchCache,
        negative_prompt: str,
        size: ImageSize,
        reference: DiffusionModel | None,
    ):
        """`reference`: the frozen initial model, for algorithms that need it."""
        self.optimization = optimization
        self.algorithm = algorithm
        self.guidance = guidance
        self.embeddings = embeddings
        self.negative_prompt = negative_prompt
        self.size = size
        self.reference = reference
        self.forward_backward = get_forward_backward_func()

    def step(self, batches: list[TrainingBatch]) -> UpdateResult:
        """Accumulates the gradient over `batches`, of all processes, and takes one step."""
        model, optimizer, scheduler = (
            self.optimization.model,
            self.optimization.optimizer,
            self.optimization.scheduler,
        )
        if self.reference is not None:
            for batch in batches:
                batch.reference_velocity = self._reference_velocity(batch)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = self.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=self.size.height * self.size.width,
            micro_batch_size=len(batches[0].prompts),
            forward_only=False,
        )
        learning_rate = max(group["lr"] for group in optimizer.param_groups)
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=1)
        return UpdateResult(
            _merge([loss.means for loss in losses], torch.mean)
            | {"train/grad_norm": float(grad_norm or 0.0), "train/learning_rate": learning_rate},
            _merge([loss.maxima for loss in losses], torch.max),
        )

    def _forward_step(
        self, batches: Iterator[TrainingBatch], model: DiffusionModel
    ) -> tuple[Tensor, partial]:
        batch = next(batches)
        return self.guidance.forward(model, self._inputs(batch)), partial(self._loss, batch)

    def _loss(self, batch: TrainingBatch, output: Tensor) -> tuple[Tensor, Loss]:
        loss = self.algorithm.loss(batch, self.guidance.combine(output))
        reported = Loss(
            loss.value.detach(),
            {name: value.detach().float() for name, value in loss.means.items()},
            {name: value.detach().float() for name, value in loss.maxima.items()},
        )
        return loss.value, reported

    @torch.no_grad()
    def _reference_velocity(self, batch: TrainingBatch) -> Tensor:
        return self.guidance.combine(self.guidance.forward(self.reference, self._inputs(batch)))

    def _inputs(self, batch: TrainingBatch) -> ModelInput:
        *embeddings, negative = self.embeddings([*batch.prompts, self.negative_prompt])
        return self.guidance.inputs(batch.latents, batch.sigma, embeddings, negative, self.size)


def _merge(reports: list[dict[str, Tensor]], reduce) -> dict[str, float]:
    return {name: reduce(torch.stack([report[name] for report in reports])).item() for name in reports[0]}
