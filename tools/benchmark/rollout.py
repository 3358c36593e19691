"""Images a second of a vLLM-Omni engine against diffusers' pipeline, on the CPU.

The engine is started and asked as a run does it: a process of its own, requests over HTTP, every step but the
last stochastic and returned. It draws a group of 8 samples of one prompt, with 1 and with 8 requests at a
time; diffusers draws it in batches of 1 and of 8. Model (random weights), size, steps and number of threads
are the same, in float32; repetitions alternate between all four, and the prompt is encoded once a group by
all. First, pictures of the same noise show that both compute the same.

    .venv-rollout/bin/python tools/benchmark/rollout.py [--threads N]

run in the rollout environment gives both the same libraries.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.utils import logging

from megatron_omni.config.schema import VllmOmniConfig
from megatron_omni.rollout.vllm_omni.client import EngineClient
from megatron_omni.rollout.vllm_omni.process import EngineProcess
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.sampling.seeds import generator

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/model"
"""Tokenizer, text encoder, image codec and schedule of all cases."""
GROUP = 8
NOISE_LEVEL = 0.7


@dataclass(frozen=True)
class Case:
    layers: int
    heads: int
    head_dim: int
    height: int
    """Pixels."""
    width: int
    steps: int

    def __str__(self) -> str:
        sizes = f"{self.layers} × {self.heads * self.head_dim}, {self.height} × {self.width} pixels"
        return f"{sizes}, {self.steps} steps"


TINY = Case(4, 4, 24, 48, 96, 10)
SMALL = Case(4, 8, 64, 256, 256, 10)
QUICK = Case(1, 2, 24, 32, 32, 3)


class Diffusers:
    def __init__(self, case: Case, folder: Path):
        self.case = case
        self.pipe = QwenImagePipeline.from_pretrained(folder, low_cpu_mem_usage=False)
        self.pipe.set_progress_bar_config(disable=True)

    def draw(self, prompt: str, seeds: range, batch: int) -> list[np.ndarray]:
        """Pictures [3, H, W] uint8, by the ODE."""
        with torch.no_grad():
            embeddings, mask = self.pipe.encode_prompt(prompt)
        pictures = []
        for start in range(0, len(seeds), batch):
            drawn = self.pipe(
                prompt_embeds=embeddings.expand(batch, -1, -1),
                prompt_embeds_mask=None if mask is None else mask.expand(batch, -1),
                true_cfg_scale=1.0,
                height=self.case.height,
                width=self.case.width,
                num_inference_steps=self.case.steps,
                generator=[generator(seed, "initial") for seed in seeds[start : start + batch]],
                output_type="np",
            )
            pictures += [(each.transpose(2, 0, 1) * 255).round().astype(np.uint8) for each in drawn.images]
        return pictures


class Engine:
    def __init__(self, case: Case, client: EngineClient):
        self.case, self.client = case, client

    def draw(self, prompt: str, seeds: range, at_a_time: int, stochastic: bool = True) -> list[np.ndarray]:
        """Pictures [3, H, W] uint8."""
        window = tuple(range(self.case.steps - 1)) if stochastic else ()
        requests = [
            SampleRequest(
                prompt=prompt,
                negative_prompt="",
                seed=seed,
                noise_seed=seed,
                height=self.case.height,
                width=self.case.width,
                num_inference_steps=self.case.steps,
                sde_type="sde",
                noise_level=NOISE_LEVEL,
                true_cfg_scale=1.0,
                window=window,
                trained=window,
            )
            for seed in seeds
        ]
        with ThreadPoolExecutor(at_a_time) as threads:
            return [arrays["image"] for _, arrays in threads.map(self.client.generate, requests)]


def make_folder(case: Case, folder: Path) -> None:
    """The quickstart's model with another transformer."""
    shutil.copytree(QUICKSTART, folder, ignore=shutil.ignore_patterns("transformer"))
    codec_channels = 16
    third = case.head_dim // 3 // 2 * 2
    QwenImageTransformer2DModel(
        in_channels=4 * codec_channels,
        out_channels=codec_channels,
        num_layers=case.layers,
        num_attention_heads=case.heads,
        attention_head_dim=case.head_dim,
        joint_attention_dim=64,
        axes_dims_rope=(case.head_dim - 2 * third, third, third),
    ).save_pretrained(folder / "transformer")


def check_agreement(diffusers: Diffusers, engine: Engine) -> None:
    seeds = range(GROUP)
    expected = diffusers.draw("a sign", seeds, GROUP)
    drawn = engine.draw("a sign", seeds, GROUP, stochastic=False)
    difference = np.abs(np.subtract(expected, drawn, dtype=np.int16))
    spread = np.std(expected, axis=0).mean()
    print(f"same noise: pixels differ by {difference.max()} at most, pictures by {spread:.0f}", flush=True)
    assert difference.max() <= 1 < spread


def measure(case: Case, diffusers: Diffusers, engine: Engine, repetitions: int) -> None:
    contestants: dict[str, Callable[[str, range], list[np.ndarray]]] = {
        f"{name}, {count} at a time": lambda prompt, seeds, draw=draw, count=count: draw(prompt, seeds, count)
        for count in (1, GROUP)
        for name, draw in (("diffusers", diffusers.draw), ("vLLM-Omni engine", engine.draw))
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(1 + repetitions):
        seeds = range(repetition * GROUP, (repetition + 1) * GROUP)
        for number, (name, draw) in enumerate(contestants.items()):
            start = time.perf_counter()
            draw(f"sign {repetition}, {number}", seeds)  # a new prompt, not one that the engine remembers
            if repetition:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    speeds = {name: GROUP / statistics.median(spent) for name, spent in seconds.items()}
    print(f"{case!s:44s}{'images/s':>10s}{'to diffusers, as many at a time':>35s}")
    for name, speed in speeds.items():
        peer = speeds[name.replace("vLLM-Omni engine", "diffusers")]
        print(f"{name:44s}{speed:10.3f}{speed / peer:35.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of diffusers, and of the engine's worker")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rollout-python", default=VllmOmniConfig.rollout_python)
    parser.add_argument("--quick", action="store_true", help="a minute model only: to see that it runs")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine's
    settings = VllmOmniConfig(rollout_python=args.rollout_python, rollout_max_num_seqs=GROUP)
    for case in (QUICK,) if args.quick else (TINY, SMALL):
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "model"
            make_folder(case, folder)
            with closing(EngineProcess(settings, str(folder), bf16=False, devices={})) as process:
                diffusers, engine = Diffusers(case, folder), Engine(case, process.open())
                check_agreement(diffusers, engine)
                measure(case, diffusers, engine, args.repetitions)


if __name__ == "__main__":
    main()
