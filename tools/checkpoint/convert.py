"""Convert a model between its Hugging Face folder and Megatron checkpoints of any layout.

python tools/checkpoint/convert.py hf-to-megatron --load-dir HF --save-dir OUT --tensor-model-parallel-size 2
python tools/checkpoint/convert.py megatron-to-hf --load-dir OUT --save-dir HF2
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from megatron_omni.errors import UserError

SHOWN_DIFFERENCES = 12
M_MMAP_THRESHOLD = -3
"""Of malloc.h: larger blocks lie outside the heap."""

Dtype = Literal["fp32", "fp16", "bf16"]


@dataclass
class Layout:
    """Layout of the checkpoint's files. It loads at every other layout, too."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer's matrices."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""


@dataclass
class Output:
    """How the result is written."""

    dtype: Dtype | None = None
    """Change the weights to this dtype; by default they stay as they are."""
    check: bool = False
    """Read the result back and compare the hash of every tensor and file with the source."""
    dry_run: bool = False
    """Examine the source and print the plan; write nothing."""


@dataclass
class HfToMegatron:
    """Hugging Face (diffusers) folder → Megatron release checkpoint."""

    load_dir: Path
    """Hugging Face folder."""
    save_dir: Path
    """Folder to write; an older conversion there is replaced."""
    layout: tyro.conf.OmitArgPrefixes[Layout]
    output: tyro.conf.OmitArgPrefixes[Output]
    model: str = "qwen_image"
    """Model family: a registered name or a 'package.module:attribute' path."""


@dataclass
class MegatronToHf:
    """Megatron checkpoint (a conversion's or a training run's) → Hugging Face folder."""

    load_dir: Path
    """Folder of checkpoints (the latest is taken), or of a single one."""
    save_dir: Path
    """Folder to write; an older export there is replaced."""
    output: tyro.conf.OmitArgPrefixes[Output]
    source: Path | None = None
    """Hugging Face folder with what a training run's checkpoint lacks; by default its model_path."""
    max_shard_size: str | None = None
    """Cut the weights into files of this size, such as 5GB; by default they are cut as they came."""


@dataclass
class MegatronToMegatron:
    """Megatron checkpoint (a conversion's or a training run's) → release checkpoint of another layout."""

    load_dir: Path
    """Folder of checkpoints (the latest is taken), or of a single one."""
    save_dir: Path
    """Folder to write; an older conversion there is replaced."""
    layout: tyro.conf.OmitArgPrefixes[Layout]
    output: tyro.conf.OmitArgPrefixes[Output]
    source: Path | None = None
    """Hugging Face folder with what a training run's checkpoint lacks; by default its model_path."""


@dataclass
class Check:
    """Compare two models in either form: the hash of every tensor and of every other file."""

    load_dir: Path
    """The one: a Hugging Face folder, or Megatron checkpoints."""
    save_dir: Path
    """The other."""
    model: str = "qwen_image"
    """Model family of a Hugging Face folder."""


Command = (
    Annotated[HfToMegatron, tyro.conf.subcommand("hf-to-megatron")]
    | Annotated[MegatronToHf, tyro.conf.subcommand("megatron-to-hf")]
    | Annotated[MegatronToMegatron, tyro.conf.subcommand("megatron-to-megatron")]
    | Annotated[Check, tyro.conf.subcommand("check")]
)


def run(command: Command) -> None:
    """Raises `UserError`."""
    set_up_memory()
    # Slow to import, which --help need not wait for.
    from megatron_omni.checkpoint.stored_model import open_either, open_hf, open_megatron

    match command:
        case HfToMegatron():
            to_megatron(command, open_hf(command.load_dir, command.model))
        case MegatronToMegatron():
            to_megatron(command, open_megatron(command.load_dir, command.source))
        case MegatronToHf():
            to_hf(command, open_megatron(command.load_dir, command.source))
        case Check():
            compare(
                open_either(command.load_dir, command.model), open_either(command.save_dir, command.model)
            )


def to_megatron(command: HfToMegatron | MegatronToMegatron, source) -> None:
    from megatron_omni.checkpoint.conversion import plan_release, write_release
    from megatron_omni.checkpoint.stored_model import open_megatron
    from megatron_omni.config.schema import ParallelConfig

    layout = ParallelConfig(
        tensor_model_parallel_size=command.layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=command.layout.pipeline_model_parallel_size,
    )
    plan = plan_release(source, command.save_dir, layout, torch_dtype(command.output.dtype))
    files = []
    for rank, shares in enumerate(plan.ranks):
        written = [part for part in shares.values() if part.writes]
        nbytes = sum(part.written_bytes() for part in written)
        files.append((f"release/__{rank}_0.distcp", len(written), nbytes))
    finish(command, source, files, plan, write_release, open_megatron)


def to_hf(command: MegatronToHf, source) -> None:
    from megatron_omni.checkpoint.conversion import plan_hf, write_hf
    from megatron_omni.checkpoint.stored_model import open_hf

    plan = plan_hf(source, command.save_dir, torch_dtype(command.output.dtype), command.max_shard_size)
    files = [
        (f"{source.family.transformer_folder}/{name}", len(header.tensors), header.file_bytes)
        for name, header in plan.files.headers.items()
    ]
    finish(command, source, files, plan, write_hf, lambda folder: open_hf(folder, source.model))


def finish(
    command, source, files: list[tuple[str, int, int]], plan, write: Callable, reopen: Callable
) -> None:
    """Prints the plan and carries it out, as far as wanted."""
    print_plan(source, command.save_dir, files)
    if command.output.dry_run:
        return
    with progress("converting", source.nbytes + source.frozen_bytes()) as advance:
        write(plan, advance)
    print(f"wrote {command.save_dir}")
    if command.output.check:
        compare(source, reopen(command.save_dir))


def compare(one, other) -> None:
    from megatron_omni.checkpoint.conversion import differences

    with progress("comparing", one.nbytes + one.frozen_bytes()) as advance:
        unequal = differences(one, other, advance)
    if unequal:
        names = "\n".join(f"  {name}" for name in unequal[:SHOWN_DIFFERENCES])
        if len(unequal) > SHOWN_DIFFERENCES:
            names += f"\n  … and {len(unequal) - SHOWN_DIFFERENCES} more"
        raise UserError(f"{one.path} and {other.path} differ in {len(unequal)} tensors or files:\n{names}")
    count = len(one.blueprint.entries)
    print(
        f"equal: {count} parameters and {len(one.frozen_parts())} other files of {one.path} and {other.path}"
    )


def print_plan(source, target: Path, files: list[tuple[str, int, int]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("file", "tensors", "size")
    for name, tensors, nbytes in files:
        table.add_row(name, str(tensors), size(nbytes))
    table.add_row(f"{len(source.frozen_parts())} other files, copied", "", size(source.frozen_bytes()))
    print(f"{source.path} ({source.model}) → {target}")
    Console().print(table)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar, advanced by a number of bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def set_up_memory() -> None:
    """For many large tensors, one after the other. Before torch is imported."""
    # glibc's heap fragments, in the end to a third of the model: every tensor shall go back to the system.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # and come from it in pages of 2 MiB


def torch_dtype(name: Dtype | None):
    import torch

    return name and {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]


def size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.2f} MiB"


def main(arguments: list[str]) -> int:
    try:
        run(tyro.cli(Command, args=arguments, description=__doc__.split("\n\n")[0]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
