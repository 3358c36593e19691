"""An engine that the trainer starts, and that cannot start."""

import socket
from contextlib import closing

import psutil
import pytest

from megatron_omni.config.schema import VllmOmniConfig
from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.process import EngineProcess
from tests.rollout.vllm_omni.engine_process import PYTHON, ended, eventually

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
