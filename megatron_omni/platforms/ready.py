"""Importing this makes Megatron usable on this hardware; every room that uses Megatron does so first."""

from megatron_omni.platforms import current_platform

current_platform().prepare()
