"""One optimizer step: micro-batches through Megatron's schedule."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_omni.algorithms.base import Advantages, Algorithm, Loss, TrainingBatch
from megatron_omni.cache import BatchCache
from megatron_omni.errors import UserError
from megatron_omni.models.base import DiffusionModel, ImageSize
from megatron_omni.parallel.pipeline import ForwardPipeline, Lane
from megatron_omni.parallel.state import Layout
from megatron_omni.rollout.base import Trajectory
from megatron_omni.sampling.guidance import Guidance, ModelInput
from megatron_omni.training.optimizer import Optimization
from megatron_omni.training.reference import Reference


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
        policy: ForwardPipeline,
        algorithm: Algorithm,
        guidance: Guidance,
        embeddings: BatchCache,
        negative_prompt: str,
        size: ImageSize,
        reference: Reference | None,
        layout: Layout,
    ):
        """`policy`: forward passes of the model in training.

        `reference`: the policy before training, for algorithms that need it.
        """
        self.optimization = optimization
        self.policy = policy
        self.algorithm = algorithm
        self.guidance = guidance
        self.embeddings = embeddings
        self.negative_prompt = negative_prompt
        self.size = size
        self.reference = reference
        self.layout = layout
        self.forward_backward = get_forward_backward_func()

    def step(self, batches: list[TrainingBatch]) -> UpdateResult:
        """Accumulates the gradient over `batches`, of all processes, and takes one step."""
        chunks, optimizer, scheduler = (
            self.optimization.chunks,
            self.optimization.optimizer,
            self.optimization.scheduler,
        )
        self._check_interleaving(len(batches))
        if self.reference is not None:
            self.reference.run(map(self._reference_velocity, batches))
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = self.forward_backward(
            forward_step_func=self._forward_step,
            data_iterator=[iter(batches) for _ in chunks],
            model=chunks,
            num_microbatches=len(batches),
            **self._hops(batches),
            forward_only=False,
        )
        learning_rate = max(group["lr"] for group in optimizer.param_groups)
        _, grad_norm, _ = optimizer.step()
        scheduler.step(increment=1)
        means, maxima = self.layout.from_last_stage(
            (
                _merge([loss.means for loss in losses], torch.mean),
                _merge([loss.maxima for loss in losses], torch.max),
            )
        )
        means |= {"train/grad_norm": float(grad_norm or 0.0), "train/learning_rate": learning_rate}
        return UpdateResult(means, maxima)

    def log_probs(self, trajectory: Trajectory, size: int) -> Tensor:
        """[B, S], of its steps under the current weights, `size` samples at a time."""
        batches = self.algorithm.micro_batches(trajectory, Advantages.uniform(len(trajectory)), size, 0)
        found = list(self.policy.run(map(self._log_prob, batches)))
        steps = trajectory.log_probs.shape[1]
        return torch.cat([torch.stack(found[i : i + steps], 1) for i in range(0, len(found), steps)])

    def _check_interleaving(self, micro_batches: int) -> None:
        pipeline = self.layout.pipeline_size
        if self.layout.chunks > 1 and micro_batches % pipeline:
            raise UserError(
                f"num_virtual_stages_per_pipeline_rank={self.layout.chunks} needs a multiple of "
                f"pipeline_model_parallel_size={pipeline} micro-batches in an update, not {micro_batches}: "
                "change micro_batch_size or updates_per_iteration."
            )

    def _hops(self, batches: list[TrainingBatch]) -> dict[str, int]:
        """Sizes of what stages hand on, as Megatron's schedules take them.

        Where they differ between micro-batches, stages have to tell each other first.
        """
        model = self.optimization.chunks[0].module
        config = model.config
        shapes = set()
        if self.layout.pipeline_size > 1:
            for batch in batches:
                inputs = self._inputs(batch)
                shapes.add(model.hop_shape(inputs.latents, inputs.condition))
        for chunk in self.optimization.chunks:
            chunk.config.variable_seq_lengths = len(shapes) > 1
        tokens, rows, _ = next(iter(shapes), (0, 0, 0))
        shared_by = config.context_parallel_size * (
            config.tensor_model_parallel_size if config.sequence_parallel else 1
        )
        return {"seq_length": tokens * shared_by, "micro_batch_size": rows}

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
        return loss.value.clone(), reported  # Megatron scales what it gets in place

    def _log_prob(self, batch: TrainingBatch) -> Lane[Tensor]:
        return self.algorithm.log_prob(batch, self.guidance.combine((yield self._inputs(batch))))

    def _reference_velocity(self, batch: TrainingBatch) -> Lane[None]:
        batch.reference_velocity = self.guidance.combine((yield self._inputs(batch)))

    def _inputs(self, batch: TrainingBatch) -> ModelInput:
        *embeddings, negative = self.embeddings([*batch.prompts, self.negative_prompt])
        return self.guidance.inputs(batch.latents, batch.sigma, embeddings, negative, self.size)


def _merge(reports: list[dict[str, Tensor]], reduce) -> dict[str, float]:
    names = reports[0] if reports else ()  # only the last stage has reports
    return {name: reduce(torch.stack([report[name] for report in reports])).item() for name in names}
