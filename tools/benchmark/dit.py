"""Time of a forward and backward pass of the Megatron Qwen-Image transformer against diffusers' module.

One process on the CPU; repetitions alternate between the two. Prints medians and their ratio, below 1
where Megatron's is faster: `python tools/benchmark/dit.py --threads 1`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import QwenImageTransformer2DModel

from megatron_omni.config.schema import ModelConfig, ParallelConfig
from megatron_omni.models.base import ImageSize, TextCondition
from megatron_omni.models.layers.linear import backend
from megatron_omni.models.qwen_image.config import QwenImageConfig, transformer_config
from megatron_omni.models.qwen_image.model import QwenImageModel


@dataclass(frozen=True)
class Case:
    layers: int
    heads: int
    head_dim: int
    size: ImageSize
    text_tokens: int
    batch: int

    def __str__(self) -> str:
        return (
            f"{self.layers} × {self.heads * self.head_dim:4d}, {self.heads} heads, "
            f"{self.size.height * self.size.width:4d} + {self.text_tokens:3d} tokens, batch {self.batch:2d}"
        )


CASES = (
    Case(4, 4, 24, ImageSize(3, 6), 16, 16),
    Case(4, 4, 24, ImageSize(3, 6), 16, 64),
    Case(4, 4, 64, ImageSize(14, 14), 24, 4),
    Case(4, 4, 64, ImageSize(28, 28), 64, 1),
    Case(4, 8, 64, ImageSize(14, 14), 24, 2),
    Case(4, 4, 128, ImageSize(30, 30), 100, 1),
)
TEXT_WIDTH = 64
CHANNELS = 64


def oracle_step(case: Case, condition: TextCondition, backward: bool) -> Callable[[], None]:
    model = QwenImageTransformer2DModel(**sizes(case))
    latents, sigma = inputs(case)

    def step() -> None:
        output = model(
            hidden_states=latents,
            timestep=sigma,
            encoder_hidden_states=condition.embeddings,
            encoder_hidden_states_mask=condition.mask if condition.padded else None,
            img_shapes=[[(1, case.size.height, case.size.width)]] * case.batch,
            return_dict=False,
        )[0]
        if backward:
            output.square().mean().backward()

    return step


def megatron_step(case: Case, condition: TextCondition, backward: bool) -> Callable[[], None]:
    qwen = QwenImageConfig(**sizes(case))
    config = transformer_config(qwen, ModelConfig(), ParallelConfig())
    model = QwenImageModel(qwen, config, backend("local"))
    latents, sigma = inputs(case)

    def step() -> None:
        output = model(latents, sigma, condition, case.size)
        if backward:
            output.square().mean().backward()

    return step


def sizes(case: Case) -> dict:
    third = case.head_dim // 3 // 2 * 2
    return {
        "num_layers": case.layers,
        "num_attention_heads": case.heads,
        "attention_head_dim": case.head_dim,
        "joint_attention_dim": TEXT_WIDTH,
        "axes_dims_rope": (case.head_dim - 2 * third, third, third),
    }


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(case.batch, case.size.height * case.size.width, CHANNELS), torch.rand(case.batch)


def text(case: Case, padded: bool) -> TextCondition:
    lengths = [case.text_tokens - (i % 3 if padded else 0) for i in range(case.batch)]
    return TextCondition.pad([torch.randn(length, TEXT_WIDTH) for length in lengths])


def medians(steps: list[Callable[[], None]], repetitions: int, clock: Callable[[], float]) -> list[float]:
    times: list[list[float]] = [[] for _ in steps]
    for repetition in range(repetitions + 2):
        for step, spent in zip(steps, times, strict=True):
            start = clock()
            step()
            if repetition >= 2:
                spent.append(clock() - start)
    return [statistics.median(spent) for spent in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--padded", action="store_true", help="prompts of unequal length, hence a mask")
    parser.add_argument("--forward-only", action="store_true", help="without gradients, as while sampling")
    parser.add_argument("--quick", action="store_true", help="the smallest case only: to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # With one thread CPU time is the same as the time on an idle machine.
    clock = time.process_time if args.threads == 1 else time.perf_counter
    print(f"{'layers × hidden, heads, image + text tokens':60s} diffusers  megatron   ratio")
    with torch.set_grad_enabled(not args.forward_only):
        for case in CASES[:1] if args.quick else CASES:
            condition = text(case, args.padded)
            steps = [make(case, condition, not args.forward_only) for make in (oracle_step, megatron_step)]
            oracle, ours = medians(steps, args.repetitions, clock)
            print(f"{case!s:60s} {oracle * 1e3:7.1f}ms {ours * 1e3:7.1f}ms {ours / oracle:7.3f}", flush=True)


if __name__ == "__main__":
    main()
