"""The YAML form: an exact round trip, and strictness that explains itself."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.config.io import from_yaml, to_yaml
from megatron_omni.config.schema import Config, DataConfig, OptimizerConfig, RolloutConfig
from megatron_omni.errors import UserError

_texts = st.text(st.characters(exclude_categories=["Cs"]))
_floats = st.floats(allow_nan=False, allow_infinity=False)
_configs = st.builds(
    Config,
    data=st.builds(
        DataConfig,
        train_data=_texts | st.sampled_from(["1e-5", "2024-01-01", "yes", "null", "1_0", "\x85", "雨\u2028"]),
    ),
    optimizer=st.builds(OptimizerConfig, lr=_floats, adam_eps=_floats),
    rollout=st.builds(
        RolloutConfig,
        negative_prompt=_texts,
        sde_window_range=st.none() | st.tuples(st.integers(), st.integers()),
        sde_type=st.sampled_from(["sde", "dance", "cps"]),
    ),
)


@given(_configs)
def test_yaml_round_trip_is_exact(config):
    assert from_yaml(to_yaml(config)) == config


def test_an_empty_file_and_an_empty_group_mean_the_defaults():
    assert from_yaml("") == Config()
    assert from_yaml("data:\noptimizer:\n  # lr: 1\n") == Config()


def test_setting_names_are_unique_over_all_groups():
    names = [setting.name for group in fields(Config) for setting in fields(group.type)]
    assert len(names) == len(set(names))


def test_scientific_notation_without_a_point_is_a_number():
    assert from_yaml("optimizer: {lr: 1e-5, adam_eps: 1E-8}").optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("text", "weights"),
    [("ocr", {"ocr": 1.0}), ("{ocr: 0.7, judge_score: 1}", {"ocr": 0.7, "judge_score": 1.0})],
)
def test_a_reward_is_a_name_or_names_with_weights(text, weights):
    config = from_yaml(f"reward: {{reward: {text}}}")
    assert config.reward.reward == weights
    assert from_yaml(to_yaml(config)) == config


def test_whole_numbers_serve_as_floats_but_not_the_reverse():
    assert from_yaml("optimizer: {clip_grad: 1}").optimizer.clip_grad == 1.0
    with pytest.raises(UserError, match=r"rollout.height must be a valid integer, not 512.5"):
        from_yaml("rollout: {height: 512.5}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {micro_batch: 2}", r"Did you mean training.micro_batch_size\?"),
        ("traning: {seed: 2}", r"traning is unknown. Did you mean training\?"),
        ("rollout: {lr: 1}", "rollout.lr is unknown. It belongs to another group: optimizer.lr"),
        ("seed: 1", "seed is unknown. It belongs to another group: training.seed"),
        ("optimizer: {min-lr: 1}", r"optimizer.min-lr is unknown. Did you mean optimizer.min_lr\?"),
        ("model: {bf16: 1}", "model.bf16 must be a valid boolean, not 1"),
        ("rollout: {sde_type: ode}", "rollout.sde_type must be 'sde', 'dance' or 'cps', not 'ode'"),
        ("rollout: {sde_window_range: [1]}", "sde_window_range"),
        ("training: 3", "training must be a mapping of settings, not 3"),
        ("training: {seed: 1, seed: 2}", "'seed' is given twice"),
        ("- 1", "must map groups"),
        ("training: {", "not valid YAML"),
        ("reward: {reward: {ocr: much}}", "reward.reward.ocr must be a valid number, not 'much'"),
        ("logging: {run_name: 12}", "logging.run_name must be a valid string, not 12"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_value_and_what_is_allowed(text, message):
    with pytest.raises(UserError, match=message) as caught:
        from_yaml(text, source="run.yaml")
    assert "run.yaml" in str(caught.value)


def test_all_mistakes_of_a_file_are_reported_at_once():
    with pytest.raises(UserError) as caught:
        from_yaml("model: {bf16: 1}\nrollout: {lr: 1}\n")
    assert "bf16" in str(caught.value) and "optimizer.lr" in str(caught.value)
