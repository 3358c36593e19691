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

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def build_optimization(config: Config, model: torch.nn.Module) -> Optimization:
    """Wraps `model` for data parallelism; float32 gradients and master weights, norm clipping, schedule.

    The schedule counts optimizer steps: `updates_per_iteration` of them an iteration.
    """
    settings = config.optimizer
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
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
        ),
        [wrapped],
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.no_sync_func = wrapped.no_sync
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
