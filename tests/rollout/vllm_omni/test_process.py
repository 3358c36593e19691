"""Engines that the trainer starts: one that cannot start, and one whose worker nobody takes away."""

import ctypes
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from megatron_omni.config.schema import VllmOmniConfig
from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.process import EngineProcess
from tests.rollout.vllm_omni.engine_process import PYTHON, ended, eventually

PR_SET_CHILD_SUBREAPER = 36
pytestmark = pytest.mark.xdist_group("vllm_omni")


@pytest.mark.slow
def test_it_ends_and_says_why_when_one_worker_cannot_start_and_the_other_waits_for_it(model_folder):
    settings = VllmOmniConfig(rollout_python=str(PYTHON), rollout_tensor_parallel_size=2, rollout_timeout=100)
    with closing(EngineProcess(settings, str(model_folder), bf16=False, devices={})) as engine:
        server = psutil.Process(engine.process.pid)

        def port_of_workers() -> str | None:
            family = server.children()
            return family[-1].environ().get("MASTER_PORT") if len(family) == 3 else None  # with a tracker

        with socket.create_server(("", int(eventually(port_of_workers)))):
            family = server.children()
            with pytest.raises(UserError, match=r"cannot start:\n.*EADDRINUSE(.|\n)*Orchestrator init"):
                engine.open()
            assert ended(family, timeout=10)


@pytest.fixture
def adopting() -> Iterator[None]:
    """This process is, as the first one of many a container, the parent of orphans and heeds none of them."""
    adopt = ctypes.CDLL(None, use_errno=True).prctl
    assert adopt(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    adopt(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_it_is_closed_at_once_where_orphans_stay_zombies(tmp_path: Path, monkeypatch, adopting):
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\nsleep 0 &\necho $! >worker\nexec sleep 100\n")
    stand_in.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    engine = EngineProcess(VllmOmniConfig(rollout_python=str(stand_in)), "", bf16=False, devices={})
    number = tmp_path / "worker"
    worker = psutil.Process(int(eventually(lambda: number.exists() and number.read_text())))
    eventually(lambda: worker.status() == psutil.STATUS_ZOMBIE)
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5
    assert worker.ppid() == os.getpid() and os.waitpid(worker.pid, 0) == (worker.pid, 0)
