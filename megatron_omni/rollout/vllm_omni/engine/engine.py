"""vLLM-Omni as the trainer sees it: samples, sleep, and weights of a known version."""

import tempfile
import uuid
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.lora.request import LoRARequest
from vllm_omni.outputs import OmniRequestOutput

from megatron_omni.errors import UserError
from megatron_omni.rollout.vllm_omni.engine.gate import Gate
from megatron_omni.rollout.vllm_omni.engine.path import path_arrays
from megatron_omni.rollout.vllm_omni.protocol import SampleRequest

ROOM = __name__.rpartition(".")[0]
CACHED_PROMPTS = 256
DEAD = "a worker of this engine has died: start another engine."


class RefusedError(Exception):
    """What the caller asked cannot be done, now or ever; the message says why."""


@dataclass(frozen=True)
class AdapterSettings:
    rank: int
    alpha: float


@dataclass(frozen=True)
class Update:
    """New weights on their way."""

    version: str
    """What the caller calls them."""
    transport: dict[str, Any]
    """What `megatron_omni.rollout.vllm_omni.transport.Receiver` opens."""
    kind: Literal["model", "adapter"]
    adapter: AdapterSettings | None = None

    def __post_init__(self):
        if (self.kind == "adapter") != (self.adapter is not None):
            raise ValueError("an update of kind 'adapter' has the adapter's rank and alpha, and no other has")


@dataclass(frozen=True)
class Sample:
    weight_version: str | None
    arrays: dict[str, np.ndarray]


class Engine:
    """One engine of one or more workers. All samples in flight have the same weights."""

    def __init__(self, model_path: Path, dtype: str, tensor_parallel_size: int, max_num_seqs: int):
        """Starts the workers and loads the model, which may take minutes."""
        self.id = uuid.uuid4().hex
        self.weight_version: str | None = None
        self.model_version: str | None = None
        """Of the weights without an adapter."""
        self.asleep = False
        self.update: Update | None = None
        self.torn: str | None = None
        """Why the weights are incomplete, after an update that failed."""
        self.adapter: LoRARequest | None = None
        self.adapter_scale = 1.0
        self.numbers = count(1)
        self.gate = Gate()
        self.omni = AsyncOmni(
            model=str(model_path),
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            step_execution=True,
            enforce_eager=True,
            enable_sleep_mode=True,
            enable_prompt_embed_cache=True,
            prompt_embed_cache_size=CACHED_PROMPTS,
            custom_pipeline_args={"pipeline_class": f"{ROOM}.qwen_image.QwenImageRollout"},
            worker_extension_cls=f"{ROOM}.worker.RolloutWorkerExtension",
        )

    async def health(self) -> dict[str, Any]:
        try:
            await self.omni.check_health()
        except EngineDeadError:
            raise RuntimeError(DEAD) from None
        return {
            "engine_id": self.id,
            "weight_version": self.weight_version,
            "model_version": self.model_version,
            "asleep": self.asleep,
        }

    async def generate(self, request: SampleRequest) -> Sample:
        self._must_be_awake()
        check(request)
        async with self.gate.through():
            if self.torn:
                raise RuntimeError(f"the weights are incomplete, send them again: {self.torn}")
            version = self.weight_version
            output = await self._sample(request)
        arrays = path_arrays(
            request, output.trajectory_latents, output.trajectory_timesteps, output.trajectory_log_probs
        )
        image = np.asarray(output.images[0]).transpose(2, 0, 1)
        return Sample(version, {name: tensor.numpy() for name, tensor in arrays.items()} | {"image": image})

    async def _sample(self, request: SampleRequest) -> OmniRequestOutput:
        prompt = {"prompt": request.prompt}
        if request.true_cfg_scale > 1:
            prompt["negative_prompt"] = request.negative_prompt
        parameters = OmniDiffusionSamplingParams(
            height=request.height,
            width=request.width,
            num_inference_steps=request.num_inference_steps,
            true_cfg_scale=request.true_cfg_scale,
            extra_args={"request": asdict(request)},
            lora_request=self.adapter,
            lora_scale=self.adapter_scale,
        )
        async for output in self.omni.generate(
            prompt, request_id=str(next(self.numbers)), sampling_params_list=[parameters]
        ):
            last = output
        if last.error:
            raise RuntimeError(last.error)
        return last

    async def sleep(self) -> None:
        """Move the weights off the device, after the samples in flight."""
        self._must_be_awake()
        if self.update:
            raise RefusedError("the weights are being updated: end that first.")
        await self.gate.close()
        try:
            await self._acknowledged(self.omni.sleep(level=1))
            self.asleep = True
        finally:
            if not self.asleep:
                await self.gate.open()

    async def wake(self) -> None:
        if not self.asleep:
            raise RefusedError("the engine is awake.")
        await self._acknowledged(self.omni.wake_up())
        self.asleep = False
        await self.gate.open()

    async def begin_weights(self, update: Update) -> None:
        """Wait for the samples in flight; none starts before the update's end."""
        self._must_be_awake()
        if self.update:  # its trainer is gone
            await self._give_up(RuntimeError(f"the update to {self.update.version} was not ended"))
        await self.gate.close()
        try:
            await self._call("begin_weights", transport=update.transport, kind=update.kind)
        except BaseException:
            await self.gate.open()
            raise
        self.update = update

    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        self._must_be_updating()
        try:
            await self._call("load_bucket", bucket=bucket)
        except Exception as error:
            await self._give_up(error)
            raise

    async def end_weights(self, names: list[str] | None) -> dict[str, Any]:
        """What the workers hold now; see the worker extension's methods."""
        update = self._must_be_updating()
        try:
            if update.kind == "model":
                report = await self._call("end_weights", names=names)
                self.adapter, self.model_version = None, update.version
            else:
                report = await self._use_adapter(update.adapter, names)
        except Exception as error:
            await self._give_up(error)
            raise
        self.weight_version, self.update, self.torn = update.version, None, None
        await self.gate.open()
        return {"version": update.version, **report}

    async def _use_adapter(self, settings: AdapterSettings, names: list[str] | None) -> dict[str, Any]:
        number = next(self.numbers)
        with tempfile.TemporaryDirectory(prefix="adapter-") as parent:
            folder = f"{parent}/{number}"
            report = await self._call("write_adapter", folder=folder, rank=settings.rank, names=names)
            adapter = LoRARequest(lora_name=str(number), lora_int_id=number, lora_path=folder)
            await self._call("add_lora", lora_request=adapter)
        scale = settings.alpha / settings.rank
        report |= await self._call("use_adapter", request=adapter, scale=scale)
        self.adapter, self.adapter_scale = adapter, scale
        return report

    async def _give_up(self, error: Exception) -> None:
        """After a failed update samples fail, too, until another has succeeded."""
        self.update, self.torn = None, str(error)
        await self.gate.open()

    async def _call(self, method: str, **arguments: Any) -> Any:
        """Of all workers; the first one's result."""
        result = await self.omni.collective_rpc(method, kwargs=arguments)
        if not result:
            raise RuntimeError(DEAD)
        while isinstance(result, list):  # stages, then workers that answer: one of each
            (result,) = result
        if isinstance(result, dict) and result.get("error"):
            error = result["error"].partition("\n\n")[0]  # without the workers' stacks
            _, refused, reason = error.partition(f": {UserError.__name__}: ")
            raise RefusedError(reason.partition("; rank ")[0]) if refused else RuntimeError(error)
        return result

    @staticmethod
    async def _acknowledged(task: Any) -> None:
        for acknowledgement in await task:
            if acknowledgement.status != "SUCCESS":
                raise RuntimeError(acknowledgement.error_msg)

    def _must_be_awake(self) -> None:
        if self.asleep:
            raise RefusedError("the engine is asleep: wake it first.")

    def _must_be_updating(self) -> Update:
        if self.update is None:
            raise RefusedError("no update of the weights has begun.")
        return self.update


def check(request: SampleRequest) -> None:
    """Raises `RefusedError` for what the model would not sample, or not as asked."""
    if request.true_cfg_scale < 1:
        raise RefusedError(f"true_cfg_scale {request.true_cfg_scale}: vLLM-Omni guides from 1 (off) on.")
    last = request.num_inference_steps - 1
    if not all(0 <= step < last for step in request.window):
        raise RefusedError(f"window {request.window}: stochastic steps lie between 0 and {last - 1}.")
    if not set(request.trained) <= set(request.window):
        raise RefusedError(f"trained steps {request.trained} are not all in the window {request.window}.")
