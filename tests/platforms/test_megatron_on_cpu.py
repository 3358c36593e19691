"""Megatron runs on the CPU, and everybody else keeps the real torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_bias_gelu
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

import megatron_omni
from megatron_omni.config.schema import ParallelConfig
from megatron_omni.parallel.state import initialize
from megatron_omni.platforms import current_platform
from tests.distributed import run_distributed

pytestmark = pytest.mark.skipif(current_platform().name != "cpu", reason="not the CPU platform")

ROOT = Path(megatron_omni.__file__).parent.parent


def from_module(name: str, expression: str, **values):
    """The value of an expression that a module called `name` evaluates."""
    return eval(expression, {"__name__": name, **values})


IMPORT_MEGATRON = """
import torch, torch.distributed, torch._dynamo
import torch.utils.data, torch.distributed.tensor, torch.distributed.checkpoint, torch.multiprocessing
rooms = (torch, torch.cuda, torch.distributed, torch.nn.Module)
before = [dict(vars(room)) for room in rooms]
import megatron_omni.platforms.ready
import megatron.core.optimizer, megatron.core.distributed, megatron.core.dist_checkpointing
for room, names in zip(rooms, before):
    print([name for name, value in names.items() if vars(room).get(name) is not value])
"""


def test_megatron_is_imported_without_a_warning_or_a_change_to_torch():
    command = [sys.executable, "-c", IMPORT_MEGATRON]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["[]"] * 4


def test_other_code_meets_no_gpu():
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["diffusers.models", "megatron_omni.training", "__main__"])
def test_the_type_of_a_tensor_is_the_real_one_for_other_code(dtype: torch.dtype, name: str):
    tensor = torch.zeros(2, dtype=dtype)
    real = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}[dtype]
    assert from_module(name, "tensor.type()", tensor=tensor) == f"torch.{real}Tensor"
    assert from_module("megatron.core.x", "tensor.type()", tensor=tensor) == f"torch.cuda.{real}Tensor"


def test_tensors_convert_by_type_in_megatron_as_elsewhere():
    tensor = torch.tensor([1.5])
    for name in ("megatron.core.x", "other"):
        converted = from_module(name, "tensor.type(dtype)", tensor=tensor, dtype=torch.float64)
        assert (converted.dtype, converted.item()) == (torch.float64, 1.5)


def test_cuda_means_the_cpu_in_megatron():
    view = parallel_state.torch
    assert view is not torch
    made = view.zeros(2, device="cuda") + view.tensor([1.0, 2.0], device=view.cuda.current_device())
    assert made.device.type == "cpu"
    assert from_module("megatron.core.x", "tensor.cuda()", tensor=made) is made
    assert (view.float32, view.nn, view.__version__) == (torch.float32, torch.nn, torch.__version__)


def test_fused_functions_are_not_compiled():
    assert not hasattr(fused_bias_gelu.bias_gelu, "_torchdynamo_orig_callable")


SPLITS = [3, 0, 4]


def gather_and_scatter_unevenly() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = initialize(ParallelConfig(tensor_model_parallel_size=3), seed=0)
    rows = torch.arange(7.0).mul(10)[:, None] + torch.arange(2)
    mine = rows.split(SPLITS)[layout.rank].clone().requires_grad_()
    whole = tensor_parallel.gather_from_sequence_parallel_region(mine, output_split_sizes=SPLITS)
    whole.backward(torch.ones_like(whole) * (layout.rank + 1))
    scattered = tensor_parallel.reduce_scatter_to_sequence_parallel_region(
        rows * (layout.rank + 1), input_split_sizes=SPLITS
    )
    return rows, whole.detach(), mine.grad, scattered


def test_unequal_shares_are_gathered_and_scattered_over_gloo():
    for rank, (rows, whole, grad, scattered) in enumerate(run_distributed(gather_and_scatter_unevenly, 3)):
        assert torch.equal(whole, rows)
        assert torch.equal(grad, torch.full_like(grad, 6))
        assert torch.equal(scattered, rows.split(SPLITS)[rank] * 6)


EXPERTS, HIDDEN = 4, 8


def run_experts(dispatcher: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """This rank's tokens through a mixture whose experts are spread over all ranks: output and gradients."""
    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        expert_model_parallel_size=ranks,
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        moe_aux_loss_coeff=0.0,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS, moe_grouped_gemm=False)
    layer = build_module(spec, config=config)
    first = rank * EXPERTS // ranks
    weights = {global_name(name, first): weight for name, weight in layer.named_parameters()}
    for name, weight in weights.items():
        random = torch.Generator().manual_seed(sum(name.encode()))
        weight.data.copy_(torch.randn(weight.shape, generator=random))
    tokens = torch.randn(10, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    mine = tokens.chunk(ranks)[rank].clone().requires_grad_()
    output, _ = layer(mine)
    output.square().sum().backward()
    return output.detach(), mine.grad, {name: weight.grad for name, weight in weights.items()}


def global_name(name: str, first_expert: int) -> str:
    if "local_experts" not in name:
        return name
    before, after = name.split("local_experts.")
    index, rest = after.split(".", 1)
    return f"{before}expert.{int(index) + first_expert}.{rest}"


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_over_two_ranks_equal_experts_on_one(dispatcher: str):
    [(output, input_grad, weight_grads)] = run_distributed(run_experts, 1, dispatcher)
    ranks = run_distributed(run_experts, 2, dispatcher)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), output)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), input_grad)
    spread = {name: grad for rank in ranks for name, grad in rank[2].items() if ".expert." in name}
    assert len(spread) == 2 * EXPERTS
    for name, grad in spread.items():
        torch.testing.assert_close(grad, weight_grads[name])
