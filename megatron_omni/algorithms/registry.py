"""Algorithms by name."""

from megatron_omni.registry import Registry

ALGORITHMS = Registry(
    "algorithm",
    {
        "flow_grpo": "megatron_omni.algorithms.flow_grpo:FlowGrpo",
        "flow_matching": "megatron_omni.algorithms.flow_matching:FlowMatching",
    },
)
