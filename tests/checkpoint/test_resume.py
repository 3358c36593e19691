"""What may change between a checkpoint and the run that resumes it."""

from dataclasses import fields

import pytest

from megatron_omni.checkpoint.resume import MAY_CHANGE, check_config
from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError


def changed(**settings) -> Config:
    """`group__name=value`."""
    config = Config()
    for name, value in settings.items():
        group, _, setting = name.partition("__")
        setattr(getattr(config, group), setting, value)
    return config


def test_layout_logging_and_length_may_change():
    check_config(
        Config(),
        changed(
            parallel__tensor_model_parallel_size=4,
            training__train_iters=7,
            training__eval_interval=3,
            checkpoint__save_interval=5,
            logging__run_name="other",
            data__eval_data="held_out.txt",
        ),
    )


def test_each_other_difference_is_listed():
    now = changed(
        training__seed=1, training__micro_batch_size=8, rollout__height=256, logging__run_name="other"
    )
    with pytest.raises(UserError) as caught:
        check_config(Config(), now)
    message = str(caught.value)
    assert "training.seed: 0 → 1" in message
    assert "training.micro_batch_size: 16 → 8" in message
    assert "rollout.height: 512 → 256" in message
    assert "run_name" not in message


def test_every_name_that_may_change_exists():
    known = {f"{group.name}.{setting.name}" for group in fields(Config) for setting in fields(group.type)}
    known |= {f"{group.name}.*" for group in fields(Config)}
    assert known >= MAY_CHANGE
