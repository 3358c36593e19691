"""What a person sees of a running job: a bar with the time left, and one line an iteration."""

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_PHASES = ("rollout", "reward_wait", "update", "weight_sync")


class ProgressDisplay:
    """A context manager. In a terminal it keeps a bar below the lines; in a log file there are only lines.

    Only global rank 0 shows anything.
    """

    def __init__(self, train_iters: int, start_iteration: int = 0, console: Console | None = None):
        self.console = console or Console()
        self.shown = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reward]}"),
            TextColumn("time left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (self.shown and self.console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=train_iters, completed=start_iteration, reward="")

    def __enter__(self) -> "ProgressDisplay":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, iteration: int, metrics: dict[str, float]) -> None:
        """Show that `iteration` is done, with the metrics of `training.metrics`."""
        reward = metrics.get("train/reward_mean")
        self._bar.update(
            self._task, completed=iteration, reward="" if reward is None else f"reward {reward:.3f}"
        )
        task = self._bar.tasks[0]
        self.message(_line(iteration, int(task.total), metrics, task.time_remaining))

    def message(self, text: str) -> None:
        """Show a line of text above the bar."""
        if self.shown:
            self.console.print(text, soft_wrap=True, highlight=False, markup=False)


def _line(iteration: int, total: int, metrics: dict[str, float], seconds_left: float | None) -> str:
    """'iteration  3/48 · reward 0.612 ± 0.210 · loss +1.2e-04 · … · 4.2 s (rollout 29 %, update 39 %)'."""
    parts = [f"iteration {iteration:>{len(str(total))}}/{total}"]
    for label, name, form in (
        ("reward", "train/reward_mean", ".3f"),
        ("±", "train/reward_std", ".3f"),
        ("eval", "eval/reward_mean", ".3f"),
        ("second judge", "eval/heldout_reward_mean", ".3f"),
        ("loss", "train/loss", "+.2e"),
        ("grad", "train/grad_norm", ".2g"),
        ("clipped", "train/clip_fraction", ".1%"),
        ("failed rewards", "reward/failed", ".0f"),
    ):
        if name in metrics and not (name == "reward/failed" and metrics[name] == 0):
            text = f"{label} {metrics[name]:{form}}"
            parts = [*parts[:-1], f"{parts[-1]} {text}"] if label == "±" else [*parts, text]
    if (seconds := metrics.get("time/iteration")) and seconds > 0:
        shares = [
            f"{phase.replace('_', ' ')} {metrics[f'time/{phase}'] / seconds:.0%}"
            for phase in _PHASES
            if metrics.get(f"time/{phase}", 0) >= 0.01 * seconds
        ]
        parts.append(f"{seconds:.1f} s" + (f" ({', '.join(shares)})" if shares else ""))
    if seconds_left:
        parts.append(f"{format_duration(seconds_left)} left")
    return " · ".join(parts)


def format_duration(seconds: float) -> str:
    """'2 h 05 min', '3 min 20 s' or '12 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
