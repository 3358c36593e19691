"""Say how much memory a run will need on each process, without its hardware and without weights.

    python tools/memory.py --processes 8 --model-path FOLDER [--config FILE] [flags of pretrain_rl.py]

Only the folder's transformer/config.json is read. The processes, their messages and all tensors are imitated,
so that any layout can be tried on a laptop. What stands beside the model (text encoder, image codec, a
reference copy) is not in the estimate.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_omni.config.parse import parse_config
from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError
from megatron_omni.models.layers.lora import add_adapters
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel import state
from megatron_omni.training.memory import MemoryEstimate, Workload, estimate

PIXELS_OF_A_TOKEN = 16
"""On a side; so with the codecs of all models here."""
MANY = 1000
"""Micro-batches: more than a pipeline can hold at a time."""


def plan(config: Config, processes: int, text_tokens: int) -> MemoryEstimate:
    """Of the first process, which holds most. Raises `UserError` for a layout that the model cannot have."""
    imitate_processes(processes)
    folder, family = Path(config.model.model_path), MODELS.get(config.model.model)
    layout = state.form_groups(config.parallel, config.training.seed, torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        chunks = [family.build_model(folder, config.model, config.parallel, stage) for stage in layout.stages]
        if config.lora.lora_rank:
            add_adapters(chunks, family.mapping, config.lora, config.training.seed)
        height, width = (side // PIXELS_OF_A_TOKEN for side in (config.rollout.height, config.rollout.width))
        workload = Workload(
            rows=config.training.micro_batch_size * (2 if config.rollout.true_cfg_scale != 1 else 1),
            text_tokens=text_tokens,
            image_tokens=height * width,
            text_channels=chunks[0].txt_in.in_features,
            latent_channels=chunks[0].img_in.in_features,
            micro_batches=MANY * layout.pipeline_size,
        )
        memory = estimate(config, layout, chunks, workload)
    state.destroy()
    return memory


def imitate_processes(count: int) -> None:
    """Make this process the first of `count`, of which the others do not exist: messages go nowhere."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    nn.utils.skip_init = lambda kind, *args, **kwargs: kind(*args, **kwargs)  # it knows no imitated tensors
    dist.all_gather_object = lambda values, value: values.__setitem__(slice(None), [value] * len(values))
    megatron = state.parallel_state
    megatron.initialize_model_parallel = partial(
        megatron.initialize_model_parallel, create_gloo_process_groups=False
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--text-tokens", type=int, default=128)
    own, settings = parser.parse_known_args(arguments)
    try:
        print(plan(parse_config(settings), own.processes, own.text_tokens))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
