"""Model families by name."""

from megatron_omni.registry import Registry

MODELS = Registry("model", {"qwen_image": "megatron_omni.models.qwen_image:FAMILY"})
