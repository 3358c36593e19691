"""A log file gets plain lines; a terminal gets the same lines and a bar; a missing metric is no error."""

import io

from rich.console import Console

from megatron_omni.training.progress import ProgressDisplay

_METRICS = {
    "train/reward_mean": 0.612, "train/reward_std": 0.21, "train/loss": 1.2e-4, "train/clip_fraction": 0.031,
    "reward/failed": 2, "time/iteration": 4.0, "time/rollout": 1.0, "time/update": 2.0,
}  # fmt: skip


def _shown(is_terminal, *updates):
    output = io.StringIO()
    with ProgressDisplay(48, console=Console(file=output, force_terminal=is_terminal, width=80)) as progress:
        for iteration, metrics in updates:
            progress.update(iteration, metrics)
    return output.getvalue()


def test_a_log_file_gets_one_plain_line_an_iteration():
    lines = _shown(False, (1, _METRICS), (2, {"train/loss": -0.5})).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("iteration  1/48 · reward 0.612 ± 0.210 · loss +1.20e-04 · clipped 3.1%")
    assert "failed rewards 2 · 4.0 s (rollout 25%, update 50%)" in lines[0]
    assert "\x1b" not in lines[0]
    assert lines[1].startswith("iteration  2/48 · loss -5.00e-01")


def test_a_terminal_gets_the_lines_and_a_bar_with_the_reward_and_the_time_left():
    shown = _shown(True, (1, _METRICS), (2, _METRICS))
    assert "iteration  2/48" in shown and "reward 0.612" in shown and "time left" in shown and "━" in shown


def test_time_left_appears_once_it_can_be_told():
    assert " left" in _shown(False, (1, _METRICS), (2, _METRICS), (3, _METRICS)).splitlines()[-1]
