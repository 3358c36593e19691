"""A run's folder read back: configuration, metrics and sample pictures. Any part may be missing."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError
from megatron_omni.training.metrics import read_metrics
from megatron_omni.training.samples import SampleCaption, load_captions, sample_folders

CONFIG_FILE = "config.yaml"
LAYOUT_FILE = "layout.txt"


@dataclass(frozen=True)
class Series:
    """The finite values of one metric, and the iterations they belong to."""

    iterations: list[int]
    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    def tail(self, count: int) -> list[float]:
        return self.values[-count:]


@dataclass(frozen=True)
class RunLog:
    """A run as its folder tells it, be it finished, going on or killed."""

    folder: Path
    settings: dict[str, dict[str, Any]]
    """By group; the defaults where config.yaml is missing or older than a setting."""
    layout: str
    """The processes' layout in words; empty if it was not written."""
    rows: list[dict[str, float | None]]
    """Metrics by iteration."""
    samples: dict[int, list[tuple[Path, SampleCaption]]]
    """Pictures by iteration."""

    @staticmethod
    def load(folder: Path) -> "RunLog":
        """Raises `UserError` if there is no such folder."""
        if not folder.is_dir():
            raise UserError(f"{str(folder)!r} is not a run's folder: there is no such folder")
        config, layout = folder / CONFIG_FILE, folder / LAYOUT_FILE
        written = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
        defaults = asdict(Config())
        return RunLog(
            folder=folder,
            settings={group: values | (written.get(group) or {}) for group, values in defaults.items()},
            layout=layout.read_text(encoding="utf-8").strip() if layout.exists() else "",
            rows=read_metrics(folder),
            samples={
                iteration: load_captions(pictures) for iteration, pictures in sample_folders(folder).items()
            },
        )

    def series(self, name: str) -> Series:
        """One metric over the run, without the iterations that lack it or where it was not finite."""
        found = [(row["iteration"], row[name]) for row in self.rows if row.get(name) is not None]
        return Series([iteration for iteration, _ in found], [value for _, value in found])

    def metric_names(self) -> list[str]:
        """All metrics ever logged, in the order of their first appearance."""
        return [
            name for name in dict.fromkeys(key for row in self.rows for key in row) if name != "iteration"
        ]

    @property
    def iteration(self) -> int:
        """The last iteration logged."""
        return self.rows[-1]["iteration"] if self.rows else 0

    @property
    def train_iters(self) -> int:
        return self.settings["training"]["train_iters"]
