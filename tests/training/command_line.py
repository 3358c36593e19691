"""`pretrain_rl.py` as its user runs it: on one or several processes, on a tiny random model."""

import contextlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

from tests.distributed import run_distributed

PROMPTS = [f'a sign that says "{word}"' for word in ("CAT", "DOG", "BIRD", "FISH", "A", "OX", "HEN", "BEE")]


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    status: int
    errors: str


def arguments(model: Path, folder: Path, **flags) -> list[str]:
    """The command line of a small, quick run in `folder`; `flags` add to it or replace."""
    prompts = folder / "prompts.txt"
    folder.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(prompt + "\n" for prompt in PROMPTS))
    settings = {
        "model_path": model,
        "train_data": prompts,
        "eval_data": prompts,
        "output_dir": folder / "runs",
        "height": 32,
        "width": 48,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "micro_batch_size": 2,
        "updates_per_iteration": 1,
        "num_inference_steps": 4,
        "clip_range": 1e-3,
        "lr": 1e-3,
        "train_iters": 3,
        "eval_interval": 2,
        "eval_samples": 4,
        "sample_images": 2,
        "reward": "brightness",
        "distributed_timeout_minutes": 1.0,
    } | flags
    line = ["--no-tensorboard"]
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            line.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            line += [flag, *(str(part) for part in (value if isinstance(value, tuple) else (value,)))]
    return line


def launch(line: list[str], processes: int = 1, timeout: float = 120) -> list[Outcome]:
    """Runs `pretrain_rl.py` to its end."""
    return run_distributed(main, processes, line, timeout=timeout)


def main(line: list[str]) -> Outcome:
    """One process of `pretrain_rl.py`."""
    import pretrain_rl

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = pretrain_rl.main(line)
        except SystemExit as exit:
            status = int(exit.code or 0)
    return Outcome(status, errors.getvalue())


def metrics(folder: Path, name: str = "run") -> list[dict[str, float]]:
    """The rows of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def reproducible(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without what the clock and the machine decide."""
    measured = ("time/", "throughput/", "memory/")
    return [{name: row[name] for name in row if not name.startswith(measured)} for row in rows]


def assert_close(one: list[dict[str, float]], other: list[dict[str, float]], tolerance: float) -> None:
    """Equal names, and equal values but for rounding."""
    assert [row.keys() for row in one] == [row.keys() for row in other]
    for a, b in zip(one, other, strict=True):
        for name in a:
            assert math.isclose(a[name], b[name], rel_tol=tolerance, abs_tol=tolerance), (
                name,
                a[name],
                b[name],
            )
