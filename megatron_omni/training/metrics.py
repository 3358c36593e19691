"""Metrics of a run, one set an iteration: metrics.jsonl, TensorBoard and, where asked, wandb."""

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from megatron_omni.config.schema import Config
from megatron_omni.training.samples import sample_folders

METRICS_FILE = "metrics.jsonl"
_WANDB_ID_FILE = "wandb_id.txt"


class MetricsWriter:
    """Writes under the same names everywhere. Only global rank 0 writes; elsewhere every call does nothing.

    `resume_iteration` is the last iteration that the loaded checkpoint has done: what an earlier process
    wrote of later ones is taken back, since they will be done again. None starts anew and takes back all.
    """

    def __init__(self, run_folder: Path, config: Config, resume_iteration: int | None):
        self._file = self._tensorboard = self._wandb = None
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return
        run_folder.mkdir(parents=True, exist_ok=True)
        cut_back(run_folder, -1 if resume_iteration is None else resume_iteration)
        self._file = (run_folder / METRICS_FILE).open("a", encoding="utf-8")
        if config.logging.tensorboard:
            # Imported here: it takes a second, which the other ranks need not spend.
            from torch.utils.tensorboard import SummaryWriter

            purge_step = 0 if resume_iteration is None else resume_iteration + 1
            self._tensorboard = SummaryWriter(run_folder / "tensorboard", purge_step=purge_step)
        if config.logging.wandb_project:
            self._wandb = _start_wandb(run_folder, config, resumed=resume_iteration is not None)

    def log(self, iteration: int, metrics: dict[str, float], images: dict[str, Tensor] | None = None) -> None:
        """Write the metrics of an iteration. A value that is not finite is null in metrics.jsonl.

        images: by name, [B, 3, H, W] uint8, or floating point in [0, 1]; for TensorBoard and wandb.
        """
        if self._file is None:
            return
        row = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration, **row}, allow_nan=False) + "\n")
        self._file.flush()
        pictures = {name: _as_uint8(batch) for name, batch in (images or {}).items()}
        if self._tensorboard:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, iteration)
            for name, batch in pictures.items():
                self._tensorboard.add_images(name, batch, iteration)
            self._tensorboard.flush()
        if self._wandb:
            import wandb

            media = {
                name: [wandb.Image(picture.permute(1, 2, 0).numpy()) for picture in batch]
                for name, batch in pictures.items()
            }
            self._wandb.log({"iteration": iteration, **metrics, **media})

    def close(self) -> None:
        """Finish all outputs; wandb waits for its uploads."""
        if self._file:
            self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()


def read_metrics(run_folder: Path) -> list[dict[str, float | None]]:
    """The rows of metrics.jsonl in the order of iterations; a line half-written at a kill is left out.

    Where an iteration stands twice, the later line holds.
    """
    path = run_folder / METRICS_FILE
    rows = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            rows[row["iteration"]] = row
        except (json.JSONDecodeError, TypeError, KeyError):
            continue
    return [rows[iteration] for iteration in sorted(rows)]


def cut_back(run_folder: Path, iteration: int) -> None:
    """Take back what the run folder holds of iterations after `iteration`: metrics and sample pictures."""
    path = run_folder / METRICS_FILE
    if path.exists():
        kept = [row for row in read_metrics(run_folder) if row["iteration"] <= iteration]
        beside = path.with_suffix(".tmp")
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        beside.replace(path)
    for drawn_at, folder in sample_folders(run_folder).items():
        if drawn_at > iteration:
            shutil.rmtree(folder)


def _start_wandb(run_folder: Path, config: Config, resumed: bool):
    """A wandb run; a resumed one goes on under the id it had."""
    import wandb

    id_file = run_folder / _WANDB_ID_FILE
    run = wandb.init(
        project=config.logging.wandb_project,
        name=config.logging.run_name,
        dir=run_folder,
        config=asdict(config),
        id=id_file.read_text() if resumed and id_file.exists() else None,
        resume="allow",
    )
    run.define_metric("*", step_metric="iteration")
    id_file.write_text(run.id)
    return run


def _as_uint8(images: Tensor) -> Tensor:
    images = images.detach().cpu()
    if images.dtype == torch.uint8:
        return images
    return images.float().nan_to_num().clamp(0, 1).mul(255).round().to(torch.uint8)
