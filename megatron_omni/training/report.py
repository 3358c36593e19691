"""The report of a run: one self-contained HTML page, made from the run's folder alone."""

import base64
import io
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from megatron_omni.config.schema import Config
from megatron_omni.training.charts import Line, line_chart, smooth, stacked_chart
from megatron_omni.training.health import Change, Finding, read_health, reward_change, training_reward_change
from megatron_omni.training.progress import format_duration
from megatron_omni.training.run_log import RunLog, Series
from megatron_omni.training.samples import SampleCaption

REPORT_FILE = "report.html"
_PHASES = ("rollout", "log_probs", "reward_wait", "update", "weight_sync")
_MOST_PICTURES = 12
_LARGEST_PICTURE = 320
_STRIP_ROWS, _STRIP_COLUMNS, _STRIP_PICTURE = 4, 8, 128
_WIDE, _NARROW, _SMALL = (11.0, 3.5), (3.9, 2.9), (3.7, 1.8)


@dataclass(frozen=True)
class _Health:
    """A small chart of the health section."""

    title: str
    metrics: tuple[str, ...]
    """The first is drawn in full, others lighter and dashed."""
    meaning: str
    limit: tuple[str, str] | float | None = None
    """A dashed level: a number, or the setting that gives it."""


_HEALTH_CHARTS = (
    _Health(
        "Log-prob difference",
        ("consistency/log_prob_abs_diff_mean", "consistency/log_prob_abs_diff_max"),
        "Sampling against its replay in training, before any update; dashed: the largest. Should be 0.",
    ),
    _Health(
        "Ratio deviation",
        ("consistency/ratio_abs_dev_max",),
        "How far the probability ratio is from 1 before any update. Should be 0.",
    ),
    _Health(
        "Clip fraction",
        ("train/clip_fraction",),
        "Share of ratios held back by the clip range. Steadily above the line means steps are too large.",
        0.1,
    ),
    _Health("KL to the start", ("train/kl",), "How far the policy has moved from the initial weights."),
    _Health(
        "Gradient norm",
        ("train/grad_norm",),
        "Before clipping; the line is where clipping starts. Spikes are a warning.",
        ("optimizer", "clip_grad"),
    ),
    _Health(
        "Loss", ("train/loss",), "In policy-gradient training it hovers near 0; look at the reward instead."
    ),
    _Health("Learning rate", ("train/learning_rate",), "As scheduled."),
    _Health(
        "Samples without signal",
        ("train/advantage_zero_fraction",),
        "Share of samples with advantage 0, because their whole group got one reward.",
    ),
    _Health("Reward spread", ("train/reward_std",), "Standard deviation over the iteration's samples."),
)


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run's folder and return its path.

    Works at any time: for a run that is finished, going on, killed, or has only just started. Raises
    `UserError` if the folder does not exist.
    """
    log = RunLog.load(run_folder)
    environment = Environment(
        loader=PackageLoader("megatron_omni.training"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "signed": lambda value: f"{value:+.3f}".replace("-", "−")}
    page = environment.get_template("report.html").render(_contents(log))
    path = run_folder / REPORT_FILE
    beside = path.with_suffix(".tmp")
    beside.write_text(page, encoding="utf-8")
    beside.replace(path)
    return path


def _contents(log: RunLog) -> dict[str, Any]:
    """What the template shows."""
    findings = read_health(log)
    return {
        "log": log,
        "settings": log.settings,
        "state": _state(log),
        "summary": _summary(log),
        "tiles": _tiles(log),
        "findings": findings,
        "verdict": _verdict(findings),
        "reward_charts": _reward_charts(log),
        "has_evaluations": len(log.series("eval/reward_mean")) > 0,
        "has_second_judge": len(log.series("eval/heldout_reward_mean")) > 0,
        "pictures": _pictures(log),
        "strip": _strip(log),
        "health_charts": _health_charts(log),
        "time": _time(log),
        "changed_settings": _changed_settings(log),
        "configuration": yaml.safe_dump(log.settings, sort_keys=False, allow_unicode=True),
        "numbers": _numbers(log),
    }


def _state(log: RunLog) -> str:
    if not log.rows:
        return "just started"
    return (
        "finished"
        if log.iteration >= log.train_iters
        else f"at iteration {log.iteration} of {log.train_iters}"
    )


def _verdict(findings: list[Finding]) -> str:
    watched = sum(finding.level == "watch" for finding in findings)
    if watched:
        return f"Watch: {watched} thing{'s' * (watched > 1)} to look at"
    return "Healthy" if any(finding.level == "good" for finding in findings) else "Too early to tell"


def _summary(log: RunLog) -> str:
    """The result in one or two sentences."""
    change = reward_change(log, "eval/reward")
    name = "held-out reward" if change else "training reward"
    change = change or training_reward_change(log)
    if change is None:
        return "There is nothing to compare yet." if log.rows else "Nothing has been logged yet."
    verb = "rose" if change.rose else "fell" if change.fell else "went"
    sentence = (
        f"In {log.iteration} iterations the {name} {verb} from {change.before:.3f} to {change.after:.3f}"
    )
    if change.error:
        sentence += f", a change of {abs(change.difference) / change.error:.1f} standard errors"
    return f"{sentence}."


@dataclass(frozen=True)
class _Tile:
    """A headline number. `change` where there is a before and an after, else only `value`."""

    label: str
    note: str
    change: Change | None = None
    value: str = ""


def _tiles(log: RunLog) -> list[_Tile]:
    tiles = []
    evaluations = log.series("eval/reward_mean").values
    if change := reward_change(log, "eval/reward"):
        tiles.append(_Tile("Held-out reward", "prompts never trained on", change))
    elif evaluations:
        tiles.append(_Tile("Held-out reward", "at the first evaluation", value=f"{evaluations[0]:.3f}"))
    elif change := training_reward_change(log):
        tiles.append(_Tile("Training reward", "first and last iterations", change))
    if change := reward_change(log, "eval/heldout_reward"):
        tiles.append(_Tile("Second judge", "a scorer never trained on", change))
    exact = log.series("eval/exact_match").values
    if len(exact) > 1:
        tiles.append(
            _Tile("Perfect scores", "share of held-out prompts", Change(exact[0], exact[-1], None, None))
        )
    seconds = sum(log.series("time/iteration").values)
    samples = _samples_per_iteration(log) * log.iteration
    note = f"{samples:,} samples" + (f" in {format_duration(seconds)}" if seconds else "")
    tiles.append(_Tile("Iterations", note, value=f"{log.iteration} / {log.train_iters}"))
    return tiles


def _samples_per_iteration(log: RunLog) -> int:
    return log.settings["rollout"]["rollout_batch_size"] * log.settings["rollout"]["n_samples_per_prompt"]


def _reward_charts(log: RunLog) -> list[Markup]:
    """The reward over the run, for a wide and for a narrow page."""
    training = log.series("train/reward_mean")
    lines = [Line(training, 0, faint=True), Line(smooth(training), 0)]
    for colour, judge in enumerate(("eval/reward", "eval/heldout_reward"), start=1):
        means, errors = log.series(f"{judge}_mean"), log.series(f"{judge}_sem")
        known = errors.values if errors.iterations == means.iterations else None
        lines.append(Line(means, colour, errors=known, markers=True, dashed=colour == 2))
    lines = [line for line in lines if len(line.series)]
    return [Markup(line_chart("Reward by iteration", lines, size=size)) for size in (_WIDE, _NARROW) if lines]


def _health_charts(log: RunLog) -> list[dict[str, Any]]:
    charts = []
    for health in _HEALTH_CHARTS:
        lines = [
            Line(log.series(metric), number, dashed=number > 0)
            for number, metric in enumerate(health.metrics)
        ]
        lines = [line for line in lines if len(line.series)]
        if not lines:
            continue
        limit = health.limit
        if isinstance(limit, tuple):
            limit = log.settings[limit[0]][limit[1]] or None
        if limit is not None and limit > 2 * max(max(line.series.values) for line in lines):
            limit = None
        svg = line_chart(f"{health.title} by iteration", lines, size=_SMALL, from_zero=True, limit=limit)
        charts.append(
            {
                "title": health.title,
                "meaning": health.meaning,
                "now": lines[0].series.values[-1],
                "svg": Markup(svg),
            }
        )
    return charts


def _time(log: RunLog) -> dict[str, Any] | None:
    """Where the time went: shares of the whole, and by iteration."""
    rows = [row for row in log.rows if row.get("time/iteration")]
    if not rows:
        return None
    iterations = [row["iteration"] for row in rows]
    phases = {
        phase: [row.get(f"time/{phase}") or 0.0 for row in rows]
        for phase in _PHASES
        if any(row.get(f"time/{phase}") for row in rows)
    }
    totals = [row["time/iteration"] for row in rows]
    phases["rest"] = [
        max(0.0, total - sum(parts)) for total, *parts in zip(totals, *phases.values(), strict=True)
    ]
    whole = sum(map(sum, phases.values()))
    layers = [Series(iterations, values) for values in phases.values()]
    stacked = stacked_chart("Seconds per iteration, by phase", layers, size=_SMALL)
    charts = [("Seconds per iteration", Markup(stacked))]
    for title, metric in (
        ("Samples per second", "throughput/samples_per_second"),
        ("Peak memory, GiB", "memory/peak_gib"),
    ):
        if len(series := log.series(metric)):
            charts.append((title, Markup(line_chart(title, [Line(series)], size=_SMALL, from_zero=True))))
    return {
        "shares": [(phase.replace("_", " "), sum(values) / whole) for phase, values in phases.items()],
        "per_iteration": sum(totals) / len(totals),
        "charts": charts,
    }


def _changed_settings(log: RunLog) -> list[tuple[str, str, Any]]:
    """Group, name and value of each setting that is not at its default."""
    defaults = asdict(Config())
    return [
        (group, name, value)
        for group, values in log.settings.items()
        for name, value in values.items()
        if value != defaults[group].get(name)
    ]


def _numbers(log: RunLog) -> list[tuple[str, ...]]:
    """Each metric's name, first, last, smallest and largest value."""
    table = []
    for name in log.metric_names():
        if values := log.series(name).values:
            numbers = (values[0], values[-1], min(values), max(values))
            table.append((name, *(_number(number) for number in numbers)))
    return table


@dataclass(frozen=True)
class _Picture:
    iteration: int
    source: str
    """A data URI."""
    caption: SampleCaption


def _pictures(log: RunLog) -> list[tuple[str, list[_Picture]]]:
    """The first prompts, each with its picture before training and now."""
    return _picture_rows(
        log, sorted({*list(log.samples)[:1], *list(log.samples)[-1:]}), _MOST_PICTURES, _LARGEST_PICTURE
    )


def _strip(log: RunLog) -> list[tuple[str, list[_Picture]]]:
    """A few prompts at several points of the run; empty where there are no more points than two."""
    iterations = list(log.samples)
    if len(iterations) < 3:
        return []
    count = min(len(iterations), _STRIP_COLUMNS)
    chosen = [iterations[round(at * (len(iterations) - 1) / (count - 1))] for at in range(count)]
    return _picture_rows(log, chosen, _STRIP_ROWS, _STRIP_PICTURE)


def _picture_rows(
    log: RunLog, iterations: list[int], rows: int, largest: int
) -> list[tuple[str, list[_Picture]]]:
    columns = [log.samples[iteration] for iteration in iterations]
    return [
        (
            entries[0][1].prompt,
            [
                _Picture(iteration, _data_uri(path, largest), caption)
                for iteration, (path, caption) in zip(iterations, entries, strict=True)
            ],
        )
        for entries in list(zip(*columns, strict=False))[:rows]
    ]


def _data_uri(path: Path, largest: int) -> str:
    """The picture for the page: unchanged if it is small, else scaled down and compressed."""
    picture = Image.open(path)
    if max(picture.size) <= largest // 2:
        kind, data = "png", path.read_bytes()
    else:
        picture.thumbnail((largest, largest), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        picture.convert("RGB").save(buffer, "webp", quality=82)
        kind, data = "webp", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _number(value: float) -> str:
    return f"{value:.4g}"
