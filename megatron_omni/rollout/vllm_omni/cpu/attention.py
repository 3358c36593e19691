"""Scaled dot-product attention for diffusion models on a CPU."""

from torch import Tensor
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSdpaImpl(SDPAImpl):
    """torch's kernel. vLLM-Omni picks `forward_cuda`, `forward_npu`, ... by platform; none is for ours."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None = None
    ) -> Tensor:
        """[B, N, heads, D] each → the same shape."""
        return self._forward_impl(query, key, value, attn_metadata)


class CpuSdpaBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuSdpaImpl
