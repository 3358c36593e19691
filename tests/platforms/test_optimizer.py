"""Megatron's data parallelism and optimizers on the CPU."""

from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.state import initialize
from tests.distributed import run_distributed

HIDDEN = 8
BATCH = 8


class Mlp(MegatronModule):
    def __init__(self, config: TransformerConfig):
        super().__init__(config)
        common = {"config": config, "init_method": nn.init.normal_, "skip_bias_add": False, "bias": True}
        self.up = ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **common)
        self.down = RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **common)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)[0]))[0]


@dataclass
class Trainer:
    """A tiny model under data parallelism, with what it has gone through."""

    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.ddp.zero_grad_buffer()
            self.optimizer.zero_grad()
            random = torch.Generator().manual_seed(step)
            x, target = torch.randn(2, BATCH, HIDDEN, generator=random).unbind()
            size = parallel_state.get_data_parallel_world_size()
            rows = slice(parallel_state.get_data_parallel_rank(), None, size)
            loss = (self.ddp(x[rows]).float() - target[rows]).square().mean()
            loss.backward()
            finalize_model_grads([self.ddp])
            _, grad_norm, _ = self.optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            self.losses.append(mean.item())
            self.grad_norms.append(grad_norm)

    def masters(self) -> list[Tensor]:
        """The optimizer's own copies of the weights."""
        return [weight.detach() for group in self.optimizer.param_groups for weight in group["params"]]


def make_trainer(parallel: ParallelConfig, dtype: torch.dtype, distributed_optimizer: bool) -> Trainer:
    layout = initialize(parallel, seed=1)
    half = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor_size,
        params_dtype=dtype,
        bf16=half,
    )
    model = Mlp(config)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
        ),
        Float16Module(config, model) if half else model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            clip_grad=0.5,
            bf16=half,
            params_dtype=dtype,
            use_distributed_optimizer=distributed_optimizer,
        ),
        [ddp],
    )
    return Trainer(ddp, optimizer)


def train(dtype: torch.dtype, distributed_optimizer: bool) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, gradient norms and final master weights."""
    trainer = make_trainer(ParallelConfig(), dtype, distributed_optimizer)
    trainer.train(0, 1, 2)
    return trainer.losses, trainer.grad_norms, trainer.masters()


@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_data_parallel_ranks_train_like_one(dtype: torch.dtype, distributed_optimizer: bool):
    [(losses, grad_norms, masters)] = run_distributed(train, 1, dtype, distributed_optimizer)
    assert {master.dtype for master in masters} == {torch.float32}
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    ranks = run_distributed(train, 2, dtype, distributed_optimizer)
    for rank_losses, rank_norms, rank_masters in ranks:
        torch.testing.assert_close(rank_losses, losses, **tolerance)
        torch.testing.assert_close(rank_norms, grad_norms, **tolerance)
        if not distributed_optimizer:
            torch.testing.assert_close(rank_masters, masters, **tolerance)
