"""Reinforcement-learning post-training of image, video and omni models on Megatron-core."""

from megatron_omni.platforms import current_platform

__version__ = "0.1.0"

current_platform().prepare()  # here, so that nothing of this package can import Megatron before
