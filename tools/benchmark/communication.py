"""Bytes that processes send for an update and for a sampling pass, beside the least that the layout needs.

Real processes talk over gloo. Every collective and message is counted where PyTorch hands it to the backend,
as what a ring of n ranks sends: of S bytes, all-reduce sends 2 (n − 1) S in all, all-gather, reduce-scatter
and broadcast (n − 1) S, all-to-all what does not stay, a message itself. The minimum follows from the sizes
(`minimum`), without padding of prompts: `python tools/benchmark/communication.py`.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

import megatron_omni.platforms.ready  # noqa: F401  # before Megatron
from megatron_omni.config.schema import Config, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_omni.models.base import ImageSize
from megatron_omni.models.layers.linear import LOCAL
from megatron_omni.models.qwen_image.config import QwenImageConfig, transformer_config
from megatron_omni.models.qwen_image.model import QwenImageModel
from megatron_omni.parallel.pipeline import Lane
from megatron_omni.parallel.state import form_groups
from tools.benchmark.processes import run_on_processes
from tools.benchmark.workload import Workload, build_chunks, build_policy, build_updater

FLOAT = 4
"""Bytes of a number: everything here is float32."""
PASSES = 2
"""Sampling passes of each micro-batch."""

TP2 = ParallelConfig(tensor_model_parallel_size=2)
PP2 = ParallelConfig(pipeline_model_parallel_size=2)
CP2 = ParallelConfig(context_parallel_size=2)
LAYOUTS = {
    "TP 2": Config(parallel=TP2),
    "TP 2 + SP": Config(parallel=replace(TP2, sequence_parallel=True)),
    "PP 2": Config(parallel=PP2),
    "PP 2 × 2 virtual stages": Config(parallel=replace(PP2, num_virtual_stages_per_pipeline_rank=2)),
    "CP 2, Ulysses": Config(parallel=CP2),
    "CP 2, ring": Config(parallel=replace(CP2, ulysses_degree_in_cp=1)),
    "DP 2": Config(),
    "DP 2, distributed optimizer": Config(optimizer=OptimizerConfig(use_distributed_optimizer=True)),
    "CP 4, Ulysses 2 × ring 2": Config(
        parallel=ParallelConfig(context_parallel_size=4, ulysses_degree_in_cp=2)
    ),
}
WORKLOAD = Workload(
    QwenImageConfig(
        num_layers=6,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=256,
        axes_dims_rope=(16, 24, 24),
    ),
    ImageSize(14, 14),
    ((24, 24),) * 4,
)
UNEQUAL = ((24, 17), (31, 24), (19, 26), (28, 22))


def processes(config: Config) -> int:
    parallel = config.parallel
    model_parallel = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    return model_parallel if model_parallel > 1 else 2


# Counting


@dataclass(frozen=True)
class Traffic:
    """What one process sends, or several do."""

    bytes: float = 0.0
    messages: int = 0
    """Collectives that it takes part in, and messages that it sends."""

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes + other.bytes, self.messages + other.messages)


class TrafficCounter(TorchDispatchMode):
    """Counts all that this thread hands to torch.distributed's backends."""

    def __init__(self):
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            self.traffic += _sent(func._opname, args)
        return func(*args, **(kwargs or {}))


def _sent(operation: str, args: tuple) -> Traffic:
    """By this rank, on average over the group's; args as in torch.distributed's C++ operations."""
    if operation in ("recv_", "recv_any_source_"):
        return Traffic()
    if operation == "send":
        return Traffic(_bytes(args[0]), 1)
    group = ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
    size, rank = group.size(), group.rank()
    if size == 1:
        return Traffic()
    match operation:
        case "barrier":
            return Traffic(0, 1)
        case "allreduce_" | "allreduce_coalesced_":
            return Traffic(2 * (size - 1) / size * _bytes(args[0]), 1)
        case "broadcast_":
            return Traffic((size - 1) / size * _bytes(args[0]), 1)
        case "allgather_" | "_allgather_base_" | "allgather_into_tensor_coalesced_":
            return Traffic((size - 1) * _bytes(args[1]), 1)
        case "reduce_scatter_" | "_reduce_scatter_base_" | "reduce_scatter_tensor_coalesced_":
            return Traffic((size - 1) / size * _bytes(args[1]), 1)
        case "alltoall_base_":
            whole, splits = args[1], args[4]
            kept = splits[rank] / len(whole) if splits and len(whole) else 1 / size
            return Traffic((1 - kept) * _bytes(whole), 1)
        case "alltoall_":
            return Traffic(_bytes(args[1]) - _bytes(args[1][rank]), 1)
    raise NotImplementedError(f"c10d::{operation} is not counted")


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(map(_bytes, tensors))


def count(work: Callable[[], Any]) -> Traffic:
    """What this process sends while it works."""
    with TrafficCounter() as counter:
        work()
    return counter.traffic


# Measuring


def measure(config: Config, workload: Workload) -> tuple[Traffic, Traffic]:
    """This process's traffic of one update and of one sampling pass of all micro-batches. Collective."""
    layout = form_groups(config.parallel, config.training.seed, torch.device("cpu"))
    chunks = build_chunks(workload.qwen, config, layout)
    policy = build_policy(config, chunks)
    updater = build_updater(workload, config, layout, policy, torch.linspace(1, 0, PASSES + 1))
    batches = workload.batches(layout)

    def lane(inputs: Any) -> Lane[None]:
        for _ in range(PASSES):
            yield inputs

    sampling = count(lambda: list(policy.run(lane(updater._inputs(batch)) for batch in batches)))
    updating = count(lambda: updater.step(batches))
    return updating, Traffic(sampling.bytes / PASSES, sampling.messages // PASSES)


def measure_all(cases: list[tuple[Config, Workload]]) -> list[tuple[Traffic, Traffic]]:
    results = []
    for case in cases:
        results.append(measure(*case))
        parallel_state.destroy_model_parallel()
    return results


# The minimum


@dataclass(frozen=True)
class Sizes:
    """What the formulas speak of, over all micro-batches and before anything is split."""

    layers: int
    hidden: int
    """Bytes of one token between layers."""
    velocity: int
    """Bytes of all predicted velocities."""
    rows: int
    """Samples."""
    tokens: int
    """Of text and image, without padding."""
    image_tokens: int
    gradients: int
    """Bytes of the gradients of all trained weights."""

    @staticmethod
    def of(workload: Workload) -> "Sizes":
        qwen = workload.qwen
        with torch.device("meta"):
            model = QwenImageModel(qwen, transformer_config(qwen, ModelConfig(), ParallelConfig()), LOCAL)
        lengths = [length for batch in workload.text_lengths for length in batch]
        image_tokens = len(lengths) * workload.image_tokens
        return Sizes(
            layers=qwen.num_layers,
            hidden=FLOAT * qwen.hidden_size,
            velocity=FLOAT * image_tokens * qwen.output_size,
            rows=len(lengths),
            tokens=image_tokens + sum(lengths),
            image_tokens=image_tokens,
            gradients=sum(FLOAT * p.numel() for p in model.parameters() if p.requires_grad),
        )


def tensor_parallel(sizes: Sizes, ranks: int, sequence_parallel: bool, training: bool) -> float:
    """Megatron's (arXiv 1909.08053; with sequence parallelism 2205.05198), between `ranks`.

    A layer enters a split product twice (attention, MLP) and leaves it twice, with all its tokens; the last
    layer leaves with those of the image only, as its MLP enters with them. Leaving sums the outputs, in the
    backward pass entering sums the gradients: all-reduce. Sequence parallelism gathers on the way in and
    reduce-scatters on the way out, the reverse in the backward pass; there it gathers the inputs once more
    for the gradient of the weights, since each rank keeps its share of the tokens only; at the end it gathers
    the velocity. The modulations' weights are split too: for each sample 12 vectors a layer and 2 at the end
    are gathered; where ranks see their share of the tokens, the gradients of the 12 are reduce-scattered.
    """
    entries = sizes.hidden * (2 * sizes.tokens * (sizes.layers - 1) + sizes.tokens + sizes.image_tokens)
    exits = sizes.hidden * (2 * sizes.tokens * (sizes.layers - 1) + 2 * sizes.image_tokens)
    modulation = sizes.hidden * sizes.rows * 12 * sizes.layers
    sent = modulation + 2 * sizes.hidden * sizes.rows
    if not sequence_parallel:
        sent += 2 * exits + training * 2 * entries
    else:
        sent += entries + exits + sizes.velocity + training * (2 * entries + exits + modulation)
    return (ranks - 1) * sent


def pipeline_parallel(sizes: Sizes, ranks: int, stages: int, training: bool) -> float:
    """Each border between stages is crossed by all tokens, in training by their gradients too.

    While sampling, every rank gets the velocity.
    """
    hops = (stages - 1) * sizes.hidden * sizes.tokens
    return 2 * hops if training else hops + (ranks - 1) * sizes.velocity


def context_parallel(sizes: Sizes, ulysses: int, ring: int, training: bool) -> float:
    """USP (arXiv 2405.07719); the ring keeps its own block only, as its memory is the reason for it.

    Ulysses moves queries, keys, values and outputs, of which each rank keeps 1 / `ulysses`, in training their
    gradients too. The ring hands keys and values on (`ring` − 1) times; the backward pass does so again and
    sends their gradients. The last layer's queries and outputs are of the image only. Every rank gets the
    velocity. Ranks hold the same weights, whose gradients are summed.
    """
    queries = sizes.hidden * (sizes.tokens * (sizes.layers - 1) + sizes.image_tokens)
    keys = sizes.hidden * sizes.tokens * sizes.layers
    exchanged = (ulysses - 1) / ulysses * 2 * (queries + keys)
    circled = (ring - 1) * 2 * keys
    ranks = ulysses * ring
    sent = exchanged + circled + (ranks - 1) * sizes.velocity
    if training:
        sent += exchanged + 2 * circled + data_parallel(sizes, ranks, training)
    return sent


def data_parallel(sizes: Sizes, ranks: int, training: bool) -> float:
    """Gradients are all-reduced; or reduce-scattered, and the new weights gathered: as many bytes."""
    return 2 * (ranks - 1) * sizes.gradients if training else 0.0


def minimum(config: Config, workload: Workload, training: bool) -> float:
    """Bytes that all processes of one of the layouts above must send: for an update, or a sampling pass."""
    parallel, sizes = config.parallel, Sizes.of(workload)
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    if tp > 1:
        return tensor_parallel(sizes, tp, parallel.sequence_parallel, training)
    if pp > 1:
        return pipeline_parallel(sizes, pp, pp * parallel.num_virtual_stages_per_pipeline_rank, training)
    if cp > 1:
        ulysses = parallel.ulysses_degree_in_cp or cp
        return context_parallel(sizes, ulysses, cp // ulysses, training)
    return data_parallel(sizes, processes(config), training)


# The table


@dataclass(frozen=True)
class Row:
    layout: str
    phase: str
    prompts: str
    sent: Traffic
    """By all processes."""
    minimum: float
    processes: int

    @property
    def ratio(self) -> float:
        """Of what is sent to the minimum; 1 where nothing need be sent and nothing is."""
        return self.sent.bytes / self.minimum if self.minimum or self.sent.bytes else 1.0

    def __str__(self) -> str:
        return (
            f"{self.layout:28s}{self.phase:10s}{self.prompts:9s}{self.sent.bytes / 2**20:12.2f}"
            f"{self.minimum / 2**20:12.2f}{self.sent.messages / self.processes:10.0f}{self.ratio:10.3f}"
        )


def rows(layouts: dict[str, Config], workloads: dict[str, Workload]) -> Iterator[Row]:
    """Layouts of as many processes share them."""
    for count, names in groupby(layouts, key=lambda name: processes(layouts[name])):
        cases = [(name, prompts) for name in names for prompts in workloads]
        arguments = [(layouts[name], workloads[prompts]) for name, prompts in cases]
        ranks = run_on_processes(measure_all, count, arguments)
        for (name, prompts), case, sent in zip(cases, arguments, zip(*ranks, strict=True), strict=True):
            for phase, each in zip(("update", "sampling"), zip(*sent, strict=True), strict=True):
                least = minimum(*case, training=phase == "update")
                yield Row(name, phase, prompts, sum(each, Traffic()), least, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args()
    print(f"{'layout':47s}{'MiB sent':>12s}{'minimum':>12s}{'messages':>10s}{'ratio':>10s}")
    workloads = {"equal": WORKLOAD, "unequal": replace(WORKLOAD, text_lengths=UNEQUAL)}
    for row in rows({name: LAYOUTS[name] for name in args.layouts}, workloads):
        print(row, flush=True)


if __name__ == "__main__":
    main()
