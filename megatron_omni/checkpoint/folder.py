"""A run's folder of checkpoints: which one is the latest, which the best, and which may go.

As with Megatron-LM: `iter_0000010/`, …, or `release/` with weights alone, and the tracker file
`latest_checkpointed_iteration.txt`. Besides, `best` links to the checkpoint with the highest reward.
A checkpoint appears whole or not at all, and so does a change of the link.
"""

import json
import shutil
from pathlib import Path

from megatron_omni.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
RECORD = "record.json"
RELEASE = "release"
BEST = "best"


def iteration_folder(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def latest_checkpoint(folder: Path) -> str | None:
    """Name of the checkpoint that the tracker file means, `iter_…` or `release`; none if there is none yet.

    Raises `UserError` if the tracker cannot be read, or if it and the folders that are there disagree.
    """
    tracker, there = folder / TRACKER, checkpoints(folder)
    if not tracker.exists():
        if there:
            raise UserError(f"{folder} holds checkpoints, but no {TRACKER}. {how_to_choose(folder)}")
        return None
    text = tracker.read_text().strip()
    if text != RELEASE and not text.isdecimal():
        raise UserError(f"{tracker} holds {text[:40]!r} instead of an iteration. {how_to_choose(folder)}")
    name = text if text == RELEASE else iteration_folder(int(text))
    if name not in there:
        raise UserError(
            f"checkpoint {folder / name}, named in {TRACKER}, is missing. {how_to_choose(folder)}"
        )
    return name


def checkpoints(folder: Path) -> list[str]:
    """Names, oldest first."""
    return sorted(path.name for pattern in ("iter_*", RELEASE) for path in folder.glob(pattern))


def how_to_choose(folder: Path) -> str:
    there = ", ".join(checkpoints(folder)) or "none"
    return (
        f"Checkpoints there: {there}. To resume from another one, write its number into {folder / TRACKER}."
    )


def link_best(folder: Path) -> None:
    """Point `best` to the checkpoint with the highest reward; of equal ones to the oldest."""
    rewards = {name: reward for name in checkpoints(folder) if (reward := _reward(folder / name)) is not None}
    if not rewards:
        return
    best = min(rewards, key=lambda name: (-rewards[name], name))
    partial = folder / f".{BEST}.partial"
    partial.unlink(missing_ok=True)
    partial.symlink_to(best)
    partial.rename(folder / BEST)


def keep_last(folder: Path, newest: int, number: int) -> None:
    """Delete checkpoints up to iteration `newest`, but the last `number` and the best one."""
    best = folder / BEST
    spared = {best.resolve().name} if best.is_symlink() else set()
    older = [path for path in sorted(folder.glob("iter_*")) if path.name <= iteration_folder(newest)]
    for path in older[:-number]:
        if path.name not in spared:
            # Renamed first: deleting takes time, and what a killed process left is no checkpoint.
            doomed = path.with_name(f".{path.name}.deleted")
            path.rename(doomed)
            shutil.rmtree(doomed)


def _reward(checkpoint: Path) -> float | None:
    try:
        return json.loads((checkpoint / RECORD).read_text())["reward"]
    except (OSError, ValueError, KeyError):
        return None  # weights alone, or damaged


def remove_leftovers(folder: Path) -> None:
    """What killed processes have left half-written or half-deleted."""
    for pattern in (".iter_*.partial", ".iter_*.deleted"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)
