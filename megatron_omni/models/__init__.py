import megatron_omni.platforms.ready  # noqa: F401  # before Megatron
