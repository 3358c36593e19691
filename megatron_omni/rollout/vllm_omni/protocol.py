"""What the trainer asks of an engine server."""

from dataclasses import dataclass

from megatron_omni.sampling.step import Kind


@dataclass(frozen=True)
class SampleRequest:
    """One image to draw, and how. See `megatron_omni.rollout.base.RolloutRequest`."""

    prompt: str
    negative_prompt: str
    seed: int
    """Of the noise of every stochastic step."""
    noise_seed: int
    """Of the initial noise."""
    height: int
    """Pixels."""
    width: int
    """Pixels."""
    num_inference_steps: int
    sde_type: Kind
    noise_level: float
    true_cfg_scale: float
    """1 is off."""
    window: tuple[int, ...]
    """Indices of the stochastic steps."""
    trained: tuple[int, ...]
    """Those of them that are returned."""
    record_means: bool = False
    """Whether to return the mean of each of those steps, too."""
