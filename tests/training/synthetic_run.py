"""Folders of runs that never ran: a healthy one, one that collapses, one that fools its reward."""

import math
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont

from megatron_omni.config.io import to_yaml
from megatron_omni.config.schema import Config
from megatron_omni.training.metrics import MetricsWriter
from megatron_omni.training.samples import SampleCaption, sample_folder, save_samples


def write_run(folder: Path, kind: str, iterations: int = 48, pictures: int = 12) -> Path:
    """`kind`: healthy, collapsing or hacking."""
    config = Config()
    config.logging.run_name, config.logging.tensorboard = folder.name, False
    config.training.train_iters, config.algorithm.clip_range = 48, 1e-3
    config.optimizer.lr = 2e-3 if kind == "collapsing" else 3e-4
    config.reward.eval_reward = "ocr_ddddocr"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "layout.txt").write_text("2 cpu process(es): tensor parallel 1 × data parallel 2")
    writer, draw = MetricsWriter(folder, config, None), random.Random(0)
    for iteration in range(iterations + 1):
        metrics = _training(kind, iteration, draw, config) if iteration else {}
        if iteration % 8 == 0:
            metrics |= _evaluation(kind, iteration, draw)
            images, captions = _pictures(_level(kind, iteration), pictures)
            save_samples(sample_folder(folder, iteration), images, captions)
        writer.log(iteration, metrics)
    writer.close()
    return folder


def _level(kind: str, iteration: int) -> float:
    if kind == "collapsing":
        return 0.36 + 0.23 * math.exp(-iteration / 4)
    return 0.586 + 0.25 * (1 - math.exp(-iteration / 16))


def _training(kind: str, iteration: int, draw: random.Random, config: Config) -> dict[str, float]:
    level, bad = _level(kind, iteration), kind == "collapsing"
    times = {"rollout": 1.2, "reward_wait": 0.5, "update": 1.7, "weight_sync": 0.02}
    times = {f"time/{name}": value * draw.uniform(0.9, 1.15) for name, value in times.items()}
    seconds = sum(times.values()) + 0.1
    return times | {
        "time/iteration": seconds,
        "throughput/samples_per_second": 256 / seconds,
        "memory/peak_gib": 1.9 + 0.1 * min(iteration, 3),
        "train/reward_mean": level + draw.gauss(-0.02, 0.02),
        "train/reward_std": 0.22 + draw.gauss(0, 0.01),
        "train/loss": draw.gauss(0, 1e-4),
        "train/grad_norm": 0.1 * draw.uniform(0.7, 1.3) * (1 + bad * iteration / 3),
        "train/clip_fraction": max(0.0, (0.15 if bad else 0.01) + draw.gauss(0, 0.004)),
        "train/advantage_zero_fraction": 0.02 + draw.random() * 0.04,
        "train/learning_rate": config.optimizer.lr,
        "consistency/log_prob_abs_diff_mean": 0.0,
        "consistency/log_prob_abs_diff_max": 0.0,
        "consistency/ratio_abs_dev_max": 0.0,
        "consistency/weight_version": iteration,
        "reward/failed": 0,
    }


def _evaluation(kind: str, iteration: int, draw: random.Random) -> dict[str, float]:
    level = _level(kind, iteration)
    judged = 0.41 if kind == "hacking" else level - 0.1
    return {
        "eval/reward_mean": level + draw.gauss(0, 0.008),
        "eval/reward_sem": 0.025,
        "eval/exact_match": max(0.0, 1.4 * level - 0.67),
        "eval/heldout_reward_mean": judged + draw.gauss(0, 0.008),
        "eval/heldout_reward_sem": 0.028,
    }


def _pictures(level: float, count: int) -> tuple[torch.Tensor, list[SampleCaption]]:
    """Noisy 96 × 48 pictures of four letters, clearer at a higher level."""
    generator, letters, font = torch.Generator().manual_seed(0), random.Random(1), ImageFont.load_default(30)
    images, captions = [], []
    for _ in range(count):
        word = "".join(letters.choices("ABCDEFGHJKLMNPRSTUVWXYZ", k=4))
        wrong = letters.random() > level
        read = word[:2] + "X" + word[3] if wrong else word
        picture = Image.new("RGB", (96, 48), (225, 222, 214))
        ImageDraw.Draw(picture).text((8, 6), read, (30, 30, 36), font)
        pixels = (
            torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(48, 96, 3).permute(2, 0, 1)
        )
        noise = torch.randn(3, 48, 96, generator=generator) * 60 * (1 - level)
        images.append((pixels + noise).clamp(0, 255).to(torch.uint8))
        captions.append(
            SampleCaption(f'A plain picture with the text "{word}"', 0.75 if wrong else 1.0, 0.75)
        )
    return torch.stack(images), captions
