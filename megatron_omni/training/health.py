"""A plain-language reading of a run's metrics: what is as it should be, and what to look at."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from megatron_omni.training.run_log import RunLog, Series

_RECENT = 10
"""Iterations that a statement about the present looks at."""
_ENOUGH = 3
"""Iterations below which nothing is said."""
_CLIP_FRACTION = 0.1
_SILENT_GROUPS = 0.5
_EXPLODED_GRADIENT = 10.0
_REPLAY_TOLERANCE = 1e-6
_SIGNIFICANT = 2.0
"""Standard errors that a change must exceed to count as one."""


@dataclass(frozen=True)
class Finding:
    """One statement. `watch` asks for a look; `good` and `note` do not."""

    level: Literal["good", "watch", "note"]
    title: str
    detail: str


@dataclass(frozen=True)
class Change:
    """A reward's mean before and after, with standard errors where they were logged."""

    before: float
    after: float
    before_error: float | None
    after_error: float | None

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def error(self) -> float:
        """Standard error of the difference, taking the two as independent; 0 if unknown."""
        return math.hypot(self.before_error or 0.0, self.after_error or 0.0)

    @property
    def rose(self) -> bool:
        return self.difference > _SIGNIFICANT * self.error and self.difference > 0

    @property
    def fell(self) -> bool:
        return -self.difference > _SIGNIFICANT * self.error and self.difference < 0


def reward_change(log: RunLog, name: str) -> Change | None:
    """The first and the last value of `<name>_mean`; None before there are two."""
    means = log.series(f"{name}_mean")
    if len(means) < 2:
        return None
    errors = dict(zip(*_columns(log.series(f"{name}_sem")), strict=True))
    first, last = means.iterations[0], means.iterations[-1]
    return Change(means.values[0], means.values[-1], errors.get(first), errors.get(last))


def training_reward_change(log: RunLog) -> Change | None:
    """Training reward over the first and the last tenth of the run, at least three iterations each."""
    values = log.series("train/reward_mean").values
    window = max(_ENOUGH, len(values) // 10)
    if len(values) < 2 * window:
        return None
    first, last = values[:window], values[-window:]
    return Change(fmean(first), fmean(last), _standard_error(first), _standard_error(last))


def read_health(log: RunLog) -> list[Finding]:
    """All findings, those to watch first."""
    if sum("train/loss" in row for row in log.rows) < _ENOUGH:
        return [Finding("note", "Few iterations so far", "The curves below say more after a while.")]
    findings = [finding for check in _CHECKS for finding in check(log)]
    return sorted(findings, key=lambda finding: finding.level != "watch")


def _reward(log: RunLog) -> Iterator[Finding]:
    evaluated = reward_change(log, "eval/reward")
    change = evaluated or training_reward_change(log)
    if change is None:
        return
    what = "held-out reward" if evaluated else "training reward"
    words = f"The {what} went from {change.before:.3f} to {change.after:.3f}"
    peak, peak_error = _peak(log, "eval/reward") if evaluated else (change.after, None)
    dropped = Change(peak, change.after, peak_error, change.after_error)
    if change.fell:
        yield Finding("watch", "Reward is falling", f"{words}. A lower learning rate is the usual remedy.")
    elif dropped.fell:
        detail = f"{words}, but had reached {peak:.3f}. An earlier checkpoint may be the better one."
        yield Finding("watch", "Reward is below its best", detail)
    elif change.rose:
        yield Finding("good", "Reward is rising", f"{words}.")
    else:
        yield Finding("note", "Reward has not moved", f"{words}: no more than chance would give.")


def _second_judge(log: RunLog) -> Iterator[Finding]:
    trained, judge = reward_change(log, "eval/reward"), reward_change(log, "eval/heldout_reward")
    if not (trained and judge and trained.rose):
        return
    words = f"The trained reward rose by {trained.difference:.3f}, the second judge by {judge.difference:.3f}"
    if judge.rose:
        yield Finding("good", "The second judge agrees", f"{words}. It is never trained on.")
    else:
        detail = f"{words}. The model may be pleasing the scorer, not getting better. Look at the pictures."
        yield Finding("watch", "Possible reward hacking", detail)


def _agreement(log: RunLog) -> Iterator[Finding]:
    worst = max(log.series("consistency/log_prob_abs_diff_max").values, default=None)
    if worst is None:
        return
    if worst <= _REPLAY_TOLERANCE:
        size = "exactly" if worst == 0 else f"to within {worst:.1g}"
        detail = f"Before each update, replayed log-probabilities equal those of the sampling {size}."
        yield Finding("good", "Sampling and training agree", detail)
    elif log.settings["rollout"]["rollout_engine"] == "vllm_omni":
        detail = f"The engine's log-probabilities differ from training's by up to {worst:.2g}"
        if log.settings["vllm_omni"]["recompute_log_probs"]:
            yield Finding("note", "The engine rounds otherwise", f"{detail}. Ratios start from training's.")
        else:
            detail += ", and ratios start from the engine's. --recompute-log-probs avoids that."
            yield Finding("watch", "Sampling and training disagree", detail)
    else:
        detail = (
            f"Replayed log-probabilities differ from the sampling's by up to {worst:.2g}; it should be 0."
        )
        yield Finding("watch", "Sampling and training disagree", detail)


def _clipping(log: RunLog) -> Iterator[Finding]:
    recent = log.series("train/clip_fraction").tail(_RECENT)
    if not recent:
        return
    words = f"Lately {fmean(recent):.1%} of the ratios were clipped"
    if fmean(recent) > _CLIP_FRACTION:
        detail = f"{words}: updates are too large. Lower the learning rate, or widen clip_range."
        yield Finding("watch", "Many ratios are clipped", detail)
    else:
        yield Finding("good", "Updates stay small", f"{words}.")


def _gradient(log: RunLog) -> Iterator[Finding]:
    norms = log.series("train/grad_norm").values
    broken = sum(None in (row.get("train/loss", 0), row.get("train/grad_norm", 0)) for row in log.rows)
    if broken:
        detail = f"In {broken} iteration(s) the loss or the gradient was not a finite number."
        yield Finding("watch", "Numbers overflowed", detail)
    if norms and max(norms[-_RECENT:]) > _EXPLODED_GRADIENT * median(norms) > 0:
        detail = (
            f"The gradient norm reached {max(norms[-_RECENT:]):.2g}, against {median(norms):.2g} usually."
        )
        yield Finding("watch", "Gradient spikes", detail)


def _signal(log: RunLog) -> Iterator[Finding]:
    recent = log.series("train/advantage_zero_fraction").tail(_RECENT)
    if recent and fmean(recent) > _SILENT_GROUPS:
        detail = (
            f"Lately {fmean(recent):.0%} of the samples had advantage 0, since their group all got the same "
            "reward. They teach nothing. Harder prompts or larger groups help."
        )
        yield Finding("watch", "Little left to learn from", detail)


def _failed_rewards(log: RunLog) -> Iterator[Finding]:
    failed = log.series("reward/failed").values
    if sum(failed):
        detail = f"{sum(failed):.0f} samples could not be scored and carried no weight. The log says why."
        yield Finding("watch", "Rewards failed", detail)


_CHECKS: tuple[Callable[[RunLog], Iterator[Finding]], ...] = (
    _reward,
    _second_judge,
    _agreement,
    _clipping,
    _gradient,
    _signal,
    _failed_rewards,
)


def _peak(log: RunLog, name: str) -> tuple[float, float | None]:
    """The best mean and its standard error."""
    means, errors = log.series(f"{name}_mean"), log.series(f"{name}_sem")
    best = max(range(len(means)), key=means.values.__getitem__)
    return means.values[best], dict(zip(*_columns(errors), strict=True)).get(means.iterations[best])


def _columns(series: Series) -> tuple[list[int], list[float]]:
    return series.iterations, series.values


def _standard_error(values: list[float]) -> float:
    mean = fmean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
