"""Metrics survive kills and resumes and stay valid JSON; pictures survive unchanged."""

import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_omni.config.schema import Config, LoggingConfig
from megatron_omni.training.metrics import METRICS_FILE, MetricsWriter, read_metrics
from megatron_omni.training.samples import SampleCaption, load_captions, sample_folder, save_samples
from tests.distributed import run_distributed

_PLAIN = Config(logging=LoggingConfig(tensorboard=False))
_TENSORBOARD = Config()


def _write(folder, config, resume, iterations, value=1.0):
    writer = MetricsWriter(folder, config, resume)
    for iteration in iterations:
        writer.log(iteration, {"train/reward_mean": value * iteration})
    writer.close()


def test_each_iteration_is_one_json_object(tmp_path):
    _write(tmp_path, _PLAIN, None, range(3))
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"iteration": iteration, "train/reward_mean": float(iteration)} for iteration in range(3)
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_null_and_the_file_stays_json(tmp_path, value):
    writer = MetricsWriter(tmp_path, _TENSORBOARD, None)
    writer.log(1, {"train/loss": value, "train/kl": 0.5})
    writer.close()
    text = (tmp_path / METRICS_FILE).read_text()
    row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row == {"iteration": 1, "train/loss": None, "train/kl": 0.5}


@settings(max_examples=25)
@given(done=st.integers(1, 12), resume=st.integers(0, 12), torn=st.text(max_size=20))
def test_a_resumed_run_reads_like_one_that_never_stopped(tmp_path_factory, done, resume, torn):
    folder = tmp_path_factory.mktemp("run")
    resume = min(resume, done)
    _write(folder, _PLAIN, None, range(1, done + 1))
    with (folder / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 99, "train' + torn.replace("\n", ""))
    _write(folder, _PLAIN, resume, range(resume + 1, 15))
    assert [(row["iteration"], row["train/reward_mean"]) for row in read_metrics(folder)] == [
        (iteration, float(iteration)) for iteration in range(1, 15)
    ]
    assert len((folder / METRICS_FILE).read_text().splitlines()) == 14


def test_a_run_that_starts_anew_takes_the_old_one_back(tmp_path):
    _write(tmp_path, _PLAIN, None, range(1, 5))
    save_samples(sample_folder(tmp_path, 4), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), [SampleCaption("x")])
    _write(tmp_path, _PLAIN, None, range(1, 3), value=7.0)
    assert [row["train/reward_mean"] for row in read_metrics(tmp_path)] == [7.0, 14.0]
    assert not sample_folder(tmp_path, 4).exists()


def test_resuming_takes_back_the_pictures_of_later_iterations_only(tmp_path):
    image = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    for iteration in (0, 10, 20):
        save_samples(sample_folder(tmp_path, iteration), image, [SampleCaption("x")])
    _write(tmp_path, _PLAIN, 10, [])
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["iter_0000000", "iter_0000010"]


def write_and_die(folder: Path) -> None:
    writer = MetricsWriter(folder, _PLAIN, None)
    for iteration in range(1, 6):
        writer.log(iteration, {"train/loss": 1.0})
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_finished_iteration_survives_sigkill(tmp_path):
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        run_distributed(write_and_die, 1, tmp_path)
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def test_tensorboard_shows_a_resumed_run_without_the_part_done_twice(tmp_path):
    _write(tmp_path, _TENSORBOARD, None, range(1, 7))
    _write(tmp_path, _TENSORBOARD, 3, range(4, 9), value=10.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("train/reward_mean")
    assert [(event.step, event.value) for event in scalars] == [
        *((step, float(step)) for step in (1, 2, 3)),
        *((step, 10.0 * step) for step in range(4, 9)),
    ]


def _two_pictures(dtype):
    images = torch.randint(
        0, 256, (2, 3, 8, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return images, images if dtype == torch.uint8 else (images.double() / 255).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pictures_survive_tensorboard(tmp_path, dtype):
    truth, given_images = _two_pictures(dtype)
    writer = MetricsWriter(tmp_path, _TENSORBOARD, None)
    writer.log(3, {}, {"samples": given_images})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Images("samples")
    stored = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    shown_side_by_side = truth.permute(2, 0, 3, 1).reshape(8, 32, 3).numpy()
    assert event.step == 3
    assert np.array_equal(stored, shown_side_by_side)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_pictures_and_the_run_id_survive_wandb_offline(tmp_path, monkeypatch, dtype):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = Config(logging=LoggingConfig(tensorboard=False, wandb_project="test"))
    truth, given_images = _two_pictures(dtype)
    writer = MetricsWriter(tmp_path, config, None)
    writer.log(1, {"train/loss": 0.5}, {"samples": given_images})
    writer.close()
    run_id = (tmp_path / "wandb_id.txt").read_text()
    stored = sorted(tmp_path.glob("wandb/offline-run-*/files/media/images/**/*.png"))
    pictures = {Image.open(path).tobytes() for path in stored}
    assert pictures == {picture.permute(1, 2, 0).numpy().tobytes() for picture in truth}
    MetricsWriter(tmp_path, config, 1).close()
    assert (tmp_path / "wandb_id.txt").read_text() == run_id


def write_beside_others(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    _write(folder / f"run_{torch.distributed.get_rank()}", _TENSORBOARD, None, [1])


def test_only_rank_0_writes(tmp_path):
    run_distributed(write_beside_others, 2, tmp_path)
    assert len(read_metrics(tmp_path / "run_0")) == 1
    assert not (tmp_path / "run_1").exists()


def test_saved_pictures_and_captions_come_back(tmp_path):
    images, _ = _two_pictures(torch.uint8)
    captions = [SampleCaption('a sign "ABCD"', 0.5, 0.25), SampleCaption("雨の街", 1.0)]
    folder = sample_folder(tmp_path, 10)
    assert folder.name == "iter_0000010"
    save_samples(folder, images, captions)
    save_samples(folder, images, captions)
    loaded = load_captions(folder)
    assert [caption for _, caption in loaded] == captions
    for (path, _), image in zip(loaded, images, strict=True):
        assert np.array_equal(np.asarray(Image.open(path)), image.permute(1, 2, 0).numpy())
    assert (folder / "contact_sheet.png").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["iter_0000010"]
