"""Time and memory of converting a Qwen-Image folder there and back, against copying it.

Makes a folder of 4 GB of random bfloat16 weights, in layers of the published width, copies it with `cp`, and
converts it to Megatron checkpoints and back with `tools/checkpoint/convert.py`. All that is written counts
until it is on the disk. Prints the peak of resident memory as a share of the weights, and times as a ratio to
that of `cp`; what came back is compared to the byte: `python tools/benchmark/convert.py --folder /data`.

The first row of the tool is a dry run: the time to start and to examine the source, whatever the size.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

TOOL = Path(__file__).parents[1] / "checkpoint" / "convert.py"
LAYERS = 6
"""Of 680 MB each."""
SMALL = {"num_attention_heads": 4, "attention_head_dim": 16, "axes_dims_rope": [4, 6, 6]}
LAYOUTS = ((1, 1), (2, 2))


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_bytes: int
    """Resident memory."""


def make_folder(folder: Path, sizes: dict) -> int:
    """A transformer of random weights; its size in bytes."""
    import torch

    from megatron_omni.checkpoint.hf_folder import hf_shapes
    from megatron_omni.checkpoint.safetensors_folder import SafetensorsWriter, WeightFiles
    from megatron_omni.checkpoint.safetensors_header import Header
    from megatron_omni.checkpoint.stored_model import Blueprint
    from megatron_omni.models.registry import MODELS
    from megatron_omni.parallel.stages import Stage

    transformer = folder / "transformer"
    transformer.mkdir(parents=True)
    config = {"_class_name": "QwenImageTransformer2DModel", "num_layers": LAYERS} | sizes
    (transformer / "config.json").write_text(json.dumps(config))
    blueprint = Blueprint.of(MODELS.get("qwen_image"), folder, Stage())
    shapes = hf_shapes(blueprint.entries, blueprint.shapes, size=1)
    header = Header.of(((name, "BF16", shape) for name, shape in sorted(shapes.items())), {"format": "pt"})
    files = WeightFiles({"diffusion_pytorch_model.safetensors": header}, None).resharded("1GB")
    noise = torch.randn(max(torch.Size(shape).numel() for shape in shapes.values()), dtype=torch.bfloat16)
    with closing(SafetensorsWriter(files, transformer)) as writer:
        for name, shape in shapes.items():
            writer.write(name, noise[: torch.Size(shape).numel()].view(shape))
            noise = noise.roll(1)
    return files.total_bytes


def cost(command: list[str | Path], work: Path) -> Cost:
    """Of running a command until all it wrote is on the disk. What it reads comes from the disk, too."""
    os.sync()
    for path in (path for path in work.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    if status:
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return Cost(time.perf_counter() - start, usage.ru_maxrss * 1024)


def convert(
    command: str, source: Path, target: Path, layout: tuple[int, int] | None = None
) -> list[str | Path]:
    flags = ["--load-dir", source, "--save-dir", target]
    if layout:
        tensor, pipeline = layout
        flags += [
            "--tensor-model-parallel-size",
            str(tensor),
            "--pipeline-model-parallel-size",
            str(pipeline),
        ]
    return [sys.executable, TOOL, command, *flags]


def same_bytes(one: Path, other: Path) -> bool:
    names = [path.relative_to(one) for path in one.rglob("*") if path.is_file()]
    return filecmp.cmpfiles(one, other, names, shallow=False)[1:] == ([], [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work; by default the system's temporary folder")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="narrow layers: to see that it runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        work = Path(name)
        # In a process of its own: a new program's peak starts from the memory of the one that starts it.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            size = process.submit(make_folder, work / "hf", SMALL if args.quick else {}).result()
        print(f"{f'{size / 1e9:.2f} GB of weights':40s} seconds  peak/weights      time/cp")

        def measure(title: str, make: Callable[[Path], list[str | Path]], baseline: float | None) -> float:
            costs = []
            for _ in range(args.repetitions):
                shutil.rmtree(work / "result", ignore_errors=True)
                costs.append(cost(make(work / "result"), work))
            seconds = statistics.median(each.seconds for each in costs)
            peak = max(each.peak_bytes for each in costs) / size
            print(
                f"{title:40s} {seconds:7.2f} {peak:13.3f} {seconds / (baseline or seconds):12.3f}", flush=True
            )
            return seconds

        def copy(target: Path) -> list[str | Path]:
            return ["cp", "-r", work / "hf", target]

        measure("cp, once before", copy, None)
        copying = measure("cp", copy, None)
        measure(
            "dry run", lambda target: [*convert("hf-to-megatron", work / "hf", target), "--dry-run"], copying
        )
        for layout in LAYOUTS:
            title = f"TP {layout[0]} × PP {layout[1]}"

            def there(target: Path, layout=layout) -> list[str | Path]:
                return convert("hf-to-megatron", work / "hf", target, layout)

            measure(f"Hugging Face → Megatron, {title}", there, copying)
            (work / "result").rename(work / "megatron")
            measure(
                f"Megatron, {title} → Hugging Face",
                lambda target: convert("megatron-to-hf", work / "megatron", target),
                copying,
            )
            if not same_bytes(work / "hf", work / "result"):
                raise SystemExit("what came back is not what was converted")
            shutil.rmtree(work / "megatron")


if __name__ == "__main__":
    main()
