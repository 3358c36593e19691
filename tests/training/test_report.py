"""The report can be made of any run at any time, says what the numbers say, and needs nothing else."""

import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from megatron_omni.config.io import to_yaml
from megatron_omni.config.schema import Config, LoggingConfig
from megatron_omni.errors import UserError
from megatron_omni.training.health import read_health
from megatron_omni.training.metrics import METRICS_FILE, MetricsWriter
from megatron_omni.training.report import write_report
from megatron_omni.training.run_log import RunLog
from megatron_omni.training.samples import SampleCaption, sample_folder, save_samples
from tests.training.synthetic_run import write_run

_ROOT = Path(__file__).parents[2]


class _Page(HTMLParser):
    """Collects what a test asks of a page; checks that elements are closed in order."""

    _EMPTY = frozenset(("meta", "img", "br"))

    def __init__(self, text):
        super().__init__()
        self.open, self.sources, self.words, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.sources += [attributes[name] for name in ("src", "href", "srcset") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in self._EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "pre"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def _report(folder):
    return _Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """A finished run; tests leave it as it is."""
    return write_run(tmp_path_factory.mktemp("healthy") / "run", "healthy")


def _levels(folder):
    return {finding.title: finding.level for finding in read_health(RunLog.load(folder))}


def _log(folder, rows):
    writer = MetricsWriter(folder, Config(logging=LoggingConfig(tensorboard=False)), None)
    for iteration, metrics in enumerate(rows, 1):
        writer.log(iteration, metrics)
    writer.close()
    return folder


def test_a_healthy_run_is_called_healthy_and_shows_all_sections(healthy):
    page = _report(healthy)
    for words in (
        "Healthy", "held-out reward rose from 0.594 to 0.823", "0.594 → 0.823", "The second judge agrees",
        "Sampling and training agree", "(left) and after 48 iterations (right)",
        "Clip fraction", "Gradient norm", "reward wait", "Peak memory", "data parallel 2", "finished",
    ):  # fmt: skip
        assert words in page.text, words
    assert "watch" not in _levels(healthy).values()


def test_several_rewards_are_named(tmp_path):
    config = Config()
    config.reward.reward = {"judge_ocr": 1.0, "brightness": 0.5}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert "reward judge_ocr + brightness" in _report(_log(tmp_path, [SOUND] * 12)).text


def test_a_collapsing_run_is_to_be_watched_for_the_right_reasons(tmp_path):
    levels = _levels(write_run(tmp_path / "run", "collapsing"))
    watched = {title for title, level in levels.items() if level == "watch"}
    assert watched == {"Reward is falling", "Many ratios are clipped"}


def test_a_reward_that_only_its_own_judge_sees_rising_is_called_out(tmp_path):
    page = _report(write_run(tmp_path / "run", "hacking"))
    assert "Possible reward hacking" in page.text and "Watch: 1 thing to look at" in page.text


SOUND = {
    "train/loss": 0.0, "train/grad_norm": 1.0, "reward/failed": 0, "train/advantage_zero_fraction": 0.1,
    "consistency/log_prob_abs_diff_max": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "title"),
    [
        ({"train/loss": float("nan")}, "Numbers overflowed"),
        ({"reward/failed": 2}, "Rewards failed"),
        ({"consistency/log_prob_abs_diff_max": 1e-3}, "Sampling and training disagree"),
        ({"train/advantage_zero_fraction": 0.9}, "Little left to learn from"),
    ],
)
def test_each_symptom_is_named(tmp_path, metrics, title):
    assert "watch" not in _levels(_log(tmp_path / "sound", [SOUND] * 12)).values()
    assert _levels(_log(tmp_path / "sick", [SOUND | metrics] * 12))[title] == "watch"


@pytest.mark.parametrize(
    ("recompute", "title", "level"),
    [
        (True, "The engine rounds otherwise", "note"),
        (False, "Sampling and training disagree", "watch"),
    ],
)
def test_an_engine_that_rounds_otherwise_is_to_be_watched_if_ratios_start_from_it(
    tmp_path, recompute, title, level
):
    config = Config()
    config.rollout.rollout_engine, config.vllm_omni.recompute_log_probs = "vllm_omni", recompute
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    rows = [SOUND | {"consistency/log_prob_abs_diff_max": 1e-3}] * 12
    assert _levels(_log(tmp_path, rows))[title] == level


def test_a_gradient_spike_is_named(tmp_path):
    rows = [{"train/loss": 0.0, "train/grad_norm": 1.0}] * 20
    assert (
        _levels(_log(tmp_path, [*rows, {"train/loss": 0.0, "train/grad_norm": 50.0}]))["Gradient spikes"]
        == "watch"
    )


def test_a_reward_past_its_best_is_named(tmp_path):
    rewards = [0.3, 0.5, 0.8, 0.6]
    rows = [{"train/loss": 0.0, "eval/reward_mean": reward, "eval/reward_sem": 0.02} for reward in rewards]
    assert _levels(_log(tmp_path, rows))["Reward is below its best"] == "watch"


def test_a_change_within_the_error_is_not_called_a_rise(tmp_path):
    rows = [{"train/loss": 0.0, "eval/reward_mean": r, "eval/reward_sem": 0.03} for r in (0.50, 0.52, 0.55)]
    assert "Reward has not moved" in _levels(_log(tmp_path, rows))


def test_an_empty_folder_gives_a_page(tmp_path):
    page = _report(tmp_path)
    assert "just started" in page.text and "Too early to tell" in page.text


@pytest.mark.parametrize("iterations", [0, 1, 3, 9])
def test_a_run_that_has_just_begun_gives_a_page(tmp_path, iterations):
    assert (
        f"at iteration {iterations} of 48" in _report(write_run(tmp_path / "run", "healthy", iterations)).text
    )


def test_a_killed_run_with_a_torn_line_and_half_written_pictures_gives_a_page(tmp_path):
    run = write_run(tmp_path / "run", "healthy", iterations=12)
    with (run / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 13, "train/rew')
    (run / "samples" / "tmp_iter_0000016").mkdir()
    assert "at iteration 12 of 48" in _report(run).text


def test_a_supervised_run_without_rewards_gives_a_page(tmp_path):
    rows = [
        {"train/loss": 1 / i, "train/grad_norm": 1.0, "time/iteration": 1.0, "time/update": 0.9}
        for i in range(1, 9)
    ]
    page = _report(_log(tmp_path, rows))
    assert "Loss" in page.text and "What the training tries to raise" not in page.text


def test_a_metric_that_was_never_finite_is_no_error(tmp_path):
    _report(_log(tmp_path, [{"train/loss": float("nan"), "train/reward_mean": float("inf")}] * 5))


def test_the_page_is_one_self_contained_small_file(healthy, tmp_path):
    run = shutil.copytree(healthy, tmp_path / "run")
    images = torch.randint(0, 256, (12, 3, 64, 64), generator=torch.Generator().manual_seed(0)).float()
    images = torch.nn.functional.interpolate(images, (512, 512), mode="bicubic").clamp(0, 255).to(torch.uint8)
    for iteration in (0, 48):
        save_samples(sample_folder(run, iteration), images, [SampleCaption("noise")] * 12)
    path = write_report(run)
    text = path.read_text(encoding="utf-8")
    page = _Page(text)
    assert path.stat().st_size < 1.5e6
    assert len(page.ids) == len(set(page.ids))
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    assert not re.search(r"(src|href)\s*=\s*.?https?://|url\(.?http|@import|<script|<link", text)
    assert sorted(item.name for item in run.iterdir() if item.suffix in (".html", ".tmp")) == ["report.html"]


def test_a_long_run_stays_small(tmp_path):
    rows = [
        {"train/loss": 0.0, "train/reward_mean": i / 1e4, "train/kl": 0.1, "time/iteration": 1.0}
        for i in range(10_000)
    ]
    assert write_report(_log(tmp_path, rows)).stat().st_size < 3e5


def test_prompts_cannot_inject_markup(tmp_path):
    image = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    evil = '<script>alert("x")</script>'
    save_samples(sample_folder(tmp_path, 0), image, [SampleCaption(evil, 1.0)])
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in text and "&lt;script" in text


def test_the_tool_remakes_the_report_and_explains_a_wrong_folder(tmp_path, capsys):
    command = [sys.executable, "tools/report.py", str(tmp_path)]
    environment = {"PYTHONPATH": str(_ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "report.html")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(_ROOT / "tools/report.py"))["main"](tmp_path / "nowhere")
    assert "nowhere" in capsys.readouterr().err


def test_a_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        write_report(tmp_path / "nowhere")
