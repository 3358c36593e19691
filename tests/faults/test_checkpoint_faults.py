"""Kills, full disks and damage, while saving, loading and exporting."""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_omni.checkpoint.distributed import Checkpointer
from megatron_omni.checkpoint.hf import export_hf, load_hf
from megatron_omni.errors import UserError
from tests.checkpoint import toy_megatron as toy
from tests.distributed import run_distributed


def open_run(tensor_parallel: int, layers: int = toy.LAYERS, **flags) -> Checkpointer:
    config = toy.config(tensor_parallel, **flags)
    run = toy.build_training(config, layers=layers)
    toy.train(run, range(2))
    return Checkpointer(run.chunks, run.optimizer, run.scheduler, config)


def save_and_wait(checkpointer: Checkpointer, *args) -> None:
    checkpointer.save(*args)
    checkpointer.finish()


def message_of(function: Callable, *args) -> str | None:
    """What the user reads; any other exception fails the test."""
    try:
        function(*args)
    except UserError as error:
        return str(error)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def save_one(folder: Path) -> None:
    open_run(2).save(folder, 3, {"at": 3})


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Two ranks' checkpoint of iteration 3."""
    folder = tmp_path_factory.mktemp("good")
    run_distributed(save_one, 2, folder)
    return folder


# Killed while saving


def save_and_die(folder: Path, event: str, file: str, flags: dict) -> None:
    """Saves iteration 4, and dies just before the first operation `event` on a file of that name."""
    checkpointer = open_run(1, **flags)

    def hook(name: str, args: tuple) -> None:
        if name == event and Path(str(args[0])).name == file:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpointer.save(folder, 4, {"at": 4}, reward=1.0)
    checkpointer.finish()


def load_and_save(folders: list[Path]) -> list[tuple[dict, dict]]:
    """The state that each folder resumes from, and again after a further save."""
    checkpointer, states = open_run(1), []
    for folder in folders:
        before = checkpointer.load(folder).state
        checkpointer.save(folder, 5, {"at": 5})
        states.append((before, checkpointer.load(folder).state))
    return states


MOMENTS = [
    ("os.mkdir", ".iter_0000004.partial"),
    ("open", "__0_0.distcp"),
    ("open", ".metadata"),
    ("open", "common.pt"),
    ("open", "record.json"),
    ("os.rename", ".iter_0000004.partial"),
    ("open", ".latest_checkpointed_iteration.txt.partial"),
    ("os.rename", ".latest_checkpointed_iteration.txt.partial"),
]
# With the new checkpoint there, while what follows from it is under way.
LATER = [("os.symlink", "iter_0000004"), ("os.rename", ".best.partial"), ("os.rename", "iter_0000003")]
LATER += [("shutil.rmtree", ".iter_0000003.deleted")]


@pytest.mark.parametrize(
    "moments, flags",
    [(MOMENTS + LATER, {}), ([MOMENTS[1], MOMENTS[5], LATER[3]], {"async_save": True})],
    ids=["waiting", "asynchronous"],
)
def test_a_save_killed_at_any_moment_leaves_the_last_checkpoint(good, tmp_path, moments, flags):
    folders = []
    for number, (event, file) in enumerate(moments):
        folders.append(Path(shutil.copytree(good, tmp_path / str(number))))
        with pytest.raises(RuntimeError, match="died with exit code -9"):
            run_distributed(save_and_die, 1, folders[-1], event, file, flags | {"keep_last_checkpoints": 1})
        assert files(folders[-1]) >= files(good) or (event, file) == LATER[-1]

    (states,) = run_distributed(load_and_save, 1, folders)
    assert states == [({"at": 4 if moment in LATER else 3}, {"at": 5}) for moment in moments]
    for folder in folders:
        assert not list(folder.glob(".*"))


# Full disks


def save_on_full_disk(folder: Path) -> str:
    checkpointer = open_run(2)
    checkpointer.save(folder, 3, {"at": 3})
    if os.environ["RANK"] == "0":
        (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free - 2**16))
    message = message_of(checkpointer.save, folder, 4, {})
    assert checkpointer.load(folder).state == {"at": 3}
    return message


def test_a_full_disk_is_an_error_on_every_rank_and_keeps_the_last_checkpoint(small_disk):
    for message in run_distributed(save_on_full_disk, 2, small_disk):
        assert f"cannot write checkpoint {small_disk / 'iter_0000004'}" in message
        assert "0.000 GiB are free on the disk" in message and "It needs 0.0" in message
    assert {path.name for path in small_disk.iterdir()} == {
        "filler",
        "iter_0000003",
        "latest_checkpointed_iteration.txt",
    }


def save_with_few_inodes(folder: Path, flags: dict) -> list[str | None]:
    """Messages of saves that may create no file, one file, and so on until one succeeds."""
    checkpointer, messages = open_run(2, **flags), []
    save_and_wait(checkpointer, folder, 3, {"at": 3})
    if os.environ["RANK"] == "0":
        while os.statvfs(folder).f_ffree:
            (folder / f"filler{os.statvfs(folder).f_ffree}").touch()
    while not messages or messages[-1]:
        assert checkpointer.load(folder).state == {"at": 3}
        messages.append(message_of(save_and_wait, checkpointer, folder, 4, {}))
        if os.environ["RANK"] == "0":
            next(folder.glob("filler*")).unlink()
            assert not list(folder.glob(".*"))
    return messages


@pytest.mark.parametrize("flags", [{}, {"async_save": True}], ids=["waiting", "asynchronous"])
def test_a_disk_that_fills_up_at_any_file_is_an_error_on_every_rank(small_disk, flags):
    """The directory, two ranks' tensors, their index, five small files and the tracker."""
    for messages in run_distributed(save_with_few_inodes, 2, small_disk, flags):
        assert len(messages) >= 8
        assert all("cannot write checkpoint" in message for message in messages[:-1])


def save_with_size_limit(folder: Path, rank: str, limit: int) -> str:
    checkpointer = open_run(2)
    if os.environ["RANK"] == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return message_of(checkpointer.save, folder, 4, {})


@pytest.mark.parametrize(
    "rank, limit, reason",
    [
        ("0", 2**10, "File too large"),
        ("1", 2**16, "in part only"),  # within a tensor
    ],
)
def test_one_ranks_failed_write_is_an_error_on_every_rank(good, tmp_path, rank, limit, reason):
    folder = Path(shutil.copytree(good, tmp_path / "folder"))
    for message in run_distributed(save_with_size_limit, 2, folder, rank, limit):
        assert "cannot write checkpoint" in message and reason in message
    assert files(folder) == files(good)


def save_in_background_with_size_limit(folder: Path) -> tuple[str, int]:
    """What `poll` raises at the end of an iteration, and of which."""
    checkpointer = open_run(2, async_save=True)
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**10, resource.RLIM_INFINITY))
    checkpointer.save(folder, 4, {})
    for iteration in range(10**6):
        if message := message_of(checkpointer.poll):
            return message, iteration


def test_a_failure_in_the_background_ends_the_same_iteration_on_every_rank(good, tmp_path):
    folder = Path(shutil.copytree(good, tmp_path / "folder"))
    (message, iteration), other = run_distributed(save_in_background_with_size_limit, 2, folder)
    assert "cannot write checkpoint" in message and "in part only" in message
    assert other == (message, iteration)
    assert files(folder) == files(good)


# Damage


def messages_of_loads(folders: list[Path]) -> list[str]:
    checkpointer = open_run(2)
    return [message_of(checkpointer.load, folder) for folder in folders]


def test_damage_is_named_on_every_rank(good, tmp_path):
    folders = {}

    def damaged(name: str) -> Path:
        folders[name] = Path(shutil.copytree(good, tmp_path / name))
        return folders[name] / "iter_0000003"

    contents = [path.name for path in (good / "iter_0000003").iterdir()]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "config.yaml", "record.json"} <= set(
        contents
    )
    for name in contents:
        path = damaged(f"cut {name}") / name
        path.write_bytes(path.read_bytes()[:-5])
        (damaged(f"no {name}") / name).unlink()
    for name in ("__0_0.distcp", ".metadata"):
        path = damaged(f"garbage {name}") / name
        path.write_bytes(b"\x93" * path.stat().st_size)
    shutil.rmtree(damaged("missing"))
    (damaged("tracker").parent / "latest_checkpointed_iteration.txt").write_text("thr")
    (damaged("no tracker").parent / "latest_checkpointed_iteration.txt").unlink()

    for messages in run_distributed(messages_of_loads, 2, list(folders.values())):
        for (name, folder), message in zip(folders.items(), messages, strict=True):
            assert message, f"{name} was loaded"
            assert str(folder) in message
            assert "To resume from another one" in message
        by_name = dict(zip(folders, messages, strict=True))
        size = (good / "iter_0000003" / "common.pt").stat().st_size
        assert f"common.pt ({size - 5}, should be {size} bytes)" in by_name["cut common.pt"]
        assert "is missing. Checkpoints there: none" in by_name["missing"]
        assert "'thr'" in by_name["tracker"]
        assert "Checkpoints there: iter_0000003" in by_name["no tracker"]


def message_of_load(folder: Path, layers: int, flags: dict) -> str | None:
    return message_of(open_run(2, layers, **flags).load, folder)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"seed": 1}, "training.seed: 0 → 1"),
        ({"model": "other"}, "model.model: 'qwen_image' → 'other'"),
        ({"lora_rank": 8}, "lora.lora_rank: 0 → 8"),
    ],
)
def test_another_runs_settings_are_refused_on_every_rank(good, flags, words):
    for message in run_distributed(message_of_load, 2, good, 2, flags):
        assert words in message


@pytest.mark.parametrize("flags", [{}, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1}])
def test_a_model_of_another_size_is_refused_with_the_names_that_differ(good, flags):
    for message in run_distributed(message_of_load, 2, good, 3, flags):
        assert "of another model" in message
        assert "layers.2.linear_fc1.bias: not in the checkpoint" in message
        assert "layers.1" not in message


def load_with_adapters(folder: Path) -> str | None:
    config = toy.config(1)
    run = toy.build_training(config)
    config.lora.lora_rank = 4
    return message_of(Checkpointer(run.chunks, run.optimizer, run.scheduler, config).load, folder)


def test_a_release_is_no_start_for_adapters(tmp_path):
    (tmp_path / "release").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    (message,) = run_distributed(load_with_adapters, 1, tmp_path)
    assert "lora_rank" in message and "model_path" in message


# Export


def export_twice(source: Path, target: Path, fill: bool) -> str | None:
    model = toy.build(2)
    load_hf([model], toy.MAPPING, source / "transformer")
    export_hf([model], toy.MAPPING, source, target)
    if fill and os.environ["RANK"] == "0":
        (target.parent / "filler").write_bytes(bytes(shutil.disk_usage(target.parent).free - 2**14))
    return message_of(export_hf, [model], toy.MAPPING, source, target)


def test_a_full_disk_keeps_the_older_export(small_disk, tmp_path):
    source = toy.hf_folder(tmp_path / "source", toy.hf_tensors())
    target = small_disk / "export"
    for message in run_distributed(export_twice, 2, source, target, True):
        assert f"cannot write {target}" in message and "GiB are free" in message
    assert files(target) == files(source)
    assert {path.name for path in small_disk.iterdir()} == {"export", "filler"}


def export_messages(source: Path, targets: list[Path]) -> list[str | None]:
    model = toy.build(2)
    return [message_of(export_hf, [model], toy.MAPPING, source, target) for target in targets]


def test_export_never_replaces_what_is_no_export(tmp_path):
    source = toy.hf_folder(tmp_path / "models" / "source", toy.hf_tensors())
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    targets = [source, source / "inner", source.parent, tmp_path / "precious", tmp_path / "file"]
    before = files(tmp_path)
    for messages in run_distributed(export_messages, 2, source, targets):
        for target, message in zip(targets, messages, strict=True):
            assert f"cannot write {target}" in message
    assert files(tmp_path) == before


def export_and_die(source: Path, target: Path, file: str) -> None:
    model = toy.build(1)
    load_hf([model], toy.MAPPING, source / "transformer")

    def hook(name: str, args: tuple) -> None:
        if name == "os.rename" and Path(str(args[0])).name == file:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    export_hf([model], toy.MAPPING, source, target)


@pytest.mark.parametrize("file", ["export", ".export.partial"])
def test_a_killed_export_is_made_good_by_the_next(tmp_path, file):
    """Killed before the older export makes room, and after it has."""
    source = toy.hf_folder(tmp_path / "source", toy.hf_tensors())
    target = Path(shutil.copytree(source, tmp_path / "export"))
    with pytest.raises(RuntimeError, match="died with exit code -9"):
        run_distributed(export_and_die, 1, source, target, file)
    assert target.exists() or file == ".export.partial"
    assert run_distributed(export_twice, 2, source, target, False) == [None, None]
    assert files(target) == files(source)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "export"}
