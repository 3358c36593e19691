"""Rollout engines by name."""

from megatron_omni.registry import Registry

ENGINES = Registry(
    "rollout engine",
    {
        "megatron": "megatron_omni.rollout.megatron.engine:MegatronEngine",
        "vllm_omni": "megatron_omni.rollout.vllm_omni.rollout:VllmOmniEngine",
        "images": "megatron_omni.rollout.images:ImageEngine",
    },
)
