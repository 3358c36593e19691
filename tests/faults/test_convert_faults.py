"""Conversions that are killed, and full disks."""

import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.folders import hashes, qwen_image_folder
from tests.distributed import run_distributed
from tools.checkpoint.convert import main


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return qwen_image_folder(tmp_path_factory.mktemp("source") / "hf", torch.float32)


def convert(command: str, source: Path, target: Path) -> int:
    return main([command, "--load-dir", str(source), "--save-dir", str(target)])


def convert_and_die(*args: object) -> None:
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        run_distributed(die_converting, 1, *args)


def die_converting(command: str, source: Path, target: Path, event: str, file: str) -> None:
    """Just before the first operation `event` on a file of that name."""

    def hook(name: str, args: tuple) -> None:
        if name == event and Path(str(args[0])).name == file:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    convert(command, source, target)


@pytest.mark.parametrize(
    "event, file",
    [("open", "__0_0.distcp"), ("open", "record.json"), ("os.rename", ".out.partial")],
    ids=["first tensor", "record", "rename"],
)
def test_a_killed_conversion_leaves_nothing_that_looks_finished(source, tmp_path, event, file):
    target = tmp_path / "out"
    convert_and_die("hf-to-megatron", source, target, event, file)
    assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert convert("hf-to-megatron", source, target) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_killed_export_keeps_the_older_one(source, tmp_path):
    assert convert("hf-to-megatron", source, tmp_path / "megatron") == 0
    assert convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "out") == 0
    convert_and_die("megatron-to-hf", tmp_path / "megatron", tmp_path / "out", "os.rename", "out")
    assert hashes(tmp_path / "out") == hashes(source)


def test_a_disk_without_room_is_refused_before_anything_is_written(source, small_disk, capsys):
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 2**20))
    assert convert("hf-to-megatron", source, small_disk / "out") == 2
    message = capsys.readouterr().err
    assert f"cannot write {small_disk / 'out'}: it needs" in message and "GiB are free" in message
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def convert_with_little_room(command: str, source: Path, target: Path) -> int:
    """No file may grow beyond 256 KiB; writing to it then fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
    return convert(command, source, target)


def test_a_disk_that_fills_up_leaves_nothing(source, tmp_path):
    (tmp_path / "targets").mkdir()
    assert convert("hf-to-megatron", source, tmp_path / "megatron") == 0
    for command, folder in (("hf-to-megatron", source), ("megatron-to-hf", tmp_path / "megatron")):
        target = tmp_path / "targets" / "out"
        assert run_distributed(convert_with_little_room, 1, command, folder, target) == [2]
        assert not list(target.parent.iterdir())
