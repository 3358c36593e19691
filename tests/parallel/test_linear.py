"""Megatron's parallel linear layers on the CPU."""

import pytest
import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.state import initialize
from tests.distributed import run_distributed

TOKENS, BATCH, HIDDEN, FFN = 6, 2, 8, 16


def run_mlp(parallel: ParallelConfig) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the two whole weights."""
    layout = initialize(parallel, seed=1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        tensor_model_parallel_size=layout.tensor_size,
        sequence_parallel=layout.sequence_parallel,
    )
    common = {"config": config, "init_method": nn.init.normal_, "skip_bias_add": False}
    up = ColumnParallelLinear(HIDDEN, FFN, bias=True, gather_output=False, **common)
    down = RowParallelLinear(FFN, HIDDEN, bias=True, input_is_parallel=True, **common)
    random = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, BATCH, HIDDEN, generator=random, requires_grad=True)
    cotangent = torch.randn(TOKENS, BATCH, HIDDEN, generator=random)
    h = scatter_to_sequence_parallel_region(x) if layout.sequence_parallel else x
    y, _ = down(torch.tanh(up(h)[0]))
    if layout.sequence_parallel:
        y = gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False)
    (y * cotangent).sum().backward()
    shards = (up.weight.grad.T.contiguous(), down.weight.grad)
    return y.detach(), x.grad, [layout.tensor_size, *shards]


def whole(shards: list[Tensor]) -> Tensor:
    return torch.cat(shards, dim=-1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_linear_layers_give_the_same_at_tensor_parallel_2_as_on_one_process(sequence_parallel: bool):
    [(output, input_grad, weight_grads)] = run_distributed(run_mlp, 1, ParallelConfig())
    ranks = run_distributed(run_mlp, 2, ParallelConfig(2, sequence_parallel))
    for rank in ranks:
        torch.testing.assert_close(rank[0], output)
        torch.testing.assert_close(rank[1], input_grad)
    for i in (1, 2):
        torch.testing.assert_close(whole([rank[2][i] for rank in ranks]), weight_grads[i])
