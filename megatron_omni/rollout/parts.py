"""What rollout engines are built from."""

from dataclasses import dataclass

from megatron_omni.cache import BatchCache
from megatron_omni.config.schema import Config
from megatron_omni.models.base import Pipeline
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout
from megatron_omni.rollout.weights import PolicyWeights


@dataclass(frozen=True)
class EngineParts:
    """The trainer's side, as `RolloutEngine`s take it."""

    config: Config
    layout: Layout
    policy: ForwardPipeline
    """Runs the model in training, the modules inside the DDP."""
    weights: PolicyWeights
    """Of that model, for engines that hold a copy."""
    pipeline: Pipeline
    embeddings: BatchCache
    """Gives each prompt's embedding [T, D]."""
