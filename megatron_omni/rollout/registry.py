"""Rollout engines by name."""

from megatron_omni.registry import Registry

ENGINES = Registry(
    "rollout engine",
    {
        "megatron": "megatron_omni.rollout.megatron.engine:MegatronEngine",
        "images": "megatron_omni.rollout.images:ImageEngine",
    },
)
