"""Megatron's data parallelism, optimizer and learning-rate schedule round a model."""

from dataclasses import dataclass

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_omni.config.schema import Config


@dataclass(frozen=True)
class Optimization:
    """A model in training and what moves it."""

    chunks: list[DistributedDataParallel]
    """One a pipeline stage on this process."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The model's chunks without what wraps them."""
        return [chunk.module for chunk in self.chunks]

    def gather_parameters(self) -> None:
        """Make the weights whole, before anything but a forward pass reads them. Collective.

        With `overlap_param_gather`, forward passes gather what an update left in pieces.
        """
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)


def build_optimization(config: Config, chunks: list[torch.nn.Module]) -> Optimization:
    """Wraps the model's chunks for data parallelism; Adam on float32 masters, norm clipping, schedule.

    The schedule counts optimizer steps: `updates_per_iteration` of them an iteration.
    """
    settings = config.optimizer
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=not settings.grad_reduce_in_bf16,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
    )
    wrapped = [
        # Later chunks of an interleaved pipeline communicate while earlier ones compute: in one bucket.
        DistributedDataParallel(chunk.config, data_parallel, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    optimizer = get_megatron_optimizer(_adam(config), wrapped)
    no_sync = [chunk.no_sync for chunk in wrapped]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
    steps = config.algorithm.updates_per_iteration
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters * steps,
        lr_decay_steps=(settings.lr_decay_iters or config.training.train_iters) * steps,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # The settings of this run hold; a checkpoint contributes the number of steps taken.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.lr_wsd_decay_iters * steps,
        lr_wsd_decay_style="linear",
    )
    return Optimization(wrapped, optimizer, scheduler)


def _adam(config: Config) -> OptimizerConfig:
    settings = config.optimizer
    adam = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=config.model.bf16,
        params_dtype=torch.bfloat16 if config.model.bf16 else torch.float32,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_param_gather=settings.overlap_param_gather,
        optimizer_cpu_offload=settings.optimizer_cpu_offload,
    )
    # How Megatron leaves master weights to an optimizer that updates elsewhere. Its own setting for this asks
    # for Transformer Engine.
    adam.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = settings.optimizer_cpu_offload
    return adam
