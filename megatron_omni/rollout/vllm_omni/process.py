"""Where an engine server runs: in a process that the trainer starts, or somewhere already."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from megatron_omni.config.schema import VllmOmniConfig
from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.client import EngineClient, EngineLostError

POLL = 0.1
"""Seconds between two looks at an engine that is starting."""
GRACE = 20.0
"""Seconds that an engine has to end in order."""
LAST_WORDS = 1000
"""Characters of the log of an engine that has ended."""
ERROR = re.compile(r"^(?:\(.*?\) )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)", re.MULTILINE)
"""What ends a traceback, after the name of the worker whose it is."""


class Host(ABC):
    """Where one engine lives."""

    beside_trainer: bool
    """Whether it uses the trainer's devices, and so has to sleep while these are needed."""

    @abstractmethod
    def open(self) -> EngineClient:
        """The engine's client once it answers; a lost one is started anew, or waited for.

        Raises `EngineLostError` if it does not answer in time or ends, and `UserError` if it can never start.
        """

    @abstractmethod
    def last_words(self) -> str:
        """What it said last, as far as that is known here."""

    @abstractmethod
    def kill(self) -> None:
        """End what `open` started at once, however it is."""

    @abstractmethod
    def close(self) -> None:
        """End it in order."""


class RunningEngine(Host):
    """At an address. Somebody else starts it again when it has died."""

    beside_trainer = False

    def __init__(self, url: str, timeout: float):
        self.client = EngineClient(url, timeout)

    def open(self) -> EngineClient:
        deadline = time.monotonic() + self.client.timeout
        while True:
            try:
                self.client.health()
                return self.client
            except EngineLostError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL)

    def last_words(self) -> str:
        return ""

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


class EngineProcess(Host):
    """A process that ends with the trainer's. It begins to start at once; `open` waits for it."""

    beside_trainer = True

    def __init__(self, settings: VllmOmniConfig, model_path: str, bf16: bool, devices: dict[str, str]):
        """`devices`: environment variables that show it the devices it may use."""
        if not Path(settings.rollout_python).exists():
            raise UserError(
                f"rollout_python {settings.rollout_python!r} does not exist: set up the environment of the "
                "rollout engine as docs/rollout.md says, and name its Python."
            )
        self.settings = settings
        self.model_path = model_path
        self.dtype = "bfloat16" if bf16 else "float32"
        self.devices = devices
        self.folder = tempfile.TemporaryDirectory(prefix="megatron_omni-engine-")
        self.log = Path(self.folder.name) / "log"
        self.ready_file = Path(self.folder.name) / "ready"
        self.process: subprocess.Popen | None = None
        self.was_ready = False
        """Whether it can start at all."""
        self._start()

    def open(self) -> EngineClient:
        if self.process is None:
            self._start()
        deadline = time.monotonic() + self.settings.rollout_timeout
        while not self.ready_file.exists():
            if self.process.poll() is not None:
                if not self.was_ready:
                    raise UserError(f"the rollout engine cannot start:\n{self._cause()}{self.last_words()}")
                raise EngineLostError("the rollout engine ended while starting")
            if time.monotonic() > deadline:
                raise EngineLostError(
                    f"the rollout engine was not ready within {self.settings.rollout_timeout:g} s"
                )
            time.sleep(POLL)
        self.was_ready = True
        return EngineClient(
            json.loads(self.ready_file.read_text())["url"], timeout=self.settings.rollout_timeout
        )

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-LAST_WORDS:].strip()

    def kill(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with its workers, which may hang, too
        self.process.wait()
        self.process = None
        self.ready_file.unlink(missing_ok=True)

    def close(self) -> None:
        if self.process:
            self.process.terminate()  # then it and its workers leave nothing in shared memory
            deadline = time.monotonic() + GRACE
            while self._is_running() and time.monotonic() < deadline:
                time.sleep(POLL)
        self.kill()
        self.folder.cleanup()

    def _cause(self) -> str:
        """The first error of an engine that cannot start; its last words tell of those that followed."""
        error = ERROR.search(self.log.read_text(errors="replace"))
        return f"{error[1]}\n...\n" if error else ""

    def _is_running(self) -> bool:
        """It or one of its workers. Zombies are not: in a container there may be nobody to take them away."""
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended meanwhile
                state, _, group = file.read_text(errors="replace").rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state != "Z":
                    return True
        return False

    def _start(self) -> None:
        command = [
            *(self.settings.rollout_python, "-m", "megatron_omni.rollout.vllm_omni.engine.server"),
            *("--model-path", self.model_path, "--dtype", self.dtype),
            *("--tensor-parallel-size", str(self.settings.rollout_tensor_parallel_size)),
            *("--max-num-seqs", str(self.settings.rollout_max_num_seqs)),
            *("--ready-file", str(self.ready_file), "--parent", str(os.getpid())),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_own_environment() | self.devices | {"VLLM_RPC_BASE_PATH": self.folder.name},
                start_new_session=True,  # Ctrl-C is for the trainer, which ends it in order
            )


def _own_environment() -> dict[str, str]:
    """Without what makes a process a rank of the trainer's, or show it the trainer's packages."""
    ours = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PYTHONPATH",
    )
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(("GROUP_", "ROLE_", "TORCHELASTIC_"))
    }
