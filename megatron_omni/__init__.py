"""Reinforcement-learning post-training of image, video and omni models on Megatron-core."""

__version__ = "0.1.0"
