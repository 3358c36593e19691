"""Workers of autoregressive and generation stages on a CPU: vLLM's CPU worker with vLLM-Omni's hooks."""

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _torch_cuda_wrapper
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class _OnCpu:
    """What vLLM's `CPUModelRunner` changes in vLLM's GPU runner, for vLLM-Omni's runners derived from it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        with _torch_cuda_wrapper():
            super().__init__(vllm_config, device)
        self._postprocess_tensors()

    def _init_device_properties(self) -> None:
        self.num_sms = None

    def _sync_device(self) -> None:
        pass

    def load_model(self, load_dummy_weights: bool = False, *args, **kwargs) -> None:
        if self.compilation_config.max_cudagraph_capture_size is None:
            self.compilation_config.max_cudagraph_capture_size = 0  # vLLM-Omni takes a maximum over it
        super().load_model(load_dummy_weights)


class CpuArModelRunner(_OnCpu, GPUARModelRunner, CPUModelRunner):
    pass


class CpuGenerationModelRunner(_OnCpu, GPUGenerationModelRunner, CPUModelRunner):
    pass


class _CpuWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: type[CPUModelRunner]

    def init_device(self) -> None:
        super().init_device()
        self.use_v2_model_runner = False  # vLLM-Omni's hooks are in the first version's runners
        self.model_runner = self.model_runner_cls(self.vllm_config, torch.device("cpu"))


class CpuArWorker(_CpuWorker):
    model_runner_cls = CpuArModelRunner


class CpuGenerationWorker(_CpuWorker):
    model_runner_cls = CpuGenerationModelRunner
