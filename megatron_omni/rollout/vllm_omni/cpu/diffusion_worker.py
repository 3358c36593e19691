"""The worker of a diffusion stage on a CPU."""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker


class CpuDiffusionWorker(DiffusionWorker):
    """Sleep mode without the GPU allocator behind it: weights leave the model and come back.

    It keeps the contract, so that whoever samples while asleep fails as on a GPU, but frees no memory.
    """

    _asleep: dict[str, Tensor] | None = None

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return nullcontext()

    def sleep(self, level: int = 1) -> int:
        """Takes the weights out of the model; returns their bytes."""
        if level != 1:
            raise ValueError(f"sleep level {level}: vLLM-Omni can wake from level 1 only.")
        self._asleep = {}
        for name, parameter in self.model_runner.pipeline.named_parameters():
            self._asleep[name] = parameter.data
            parameter.data = parameter.data.new_empty(0)
        return sum(weights.nbytes for weights in self._asleep.values())

    def wake_up(self, tags: list[str] | None = None) -> bool:
        parameters = dict(self.model_runner.pipeline.named_parameters())
        for name, weights in (self._asleep or {}).items():
            parameters[name].data = weights
        self._asleep = None
        return True
