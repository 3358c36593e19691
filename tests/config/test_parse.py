"""The command line: the file gives defaults, flags override it, mistakes end with a suggestion."""

from dataclasses import fields

import pytest

from megatron_omni.config.parse import parse_config
from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {bf16: true}\noptimizer: {lr: 1e-4}\ntraining: {train_iters: 7}\n")
    return str(path)


def test_no_arguments_give_the_defaults():
    assert parse_config([]) == Config()


def test_flags_have_megatrons_names():
    flags = """--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 4 --train-iters 10 --bf16
        --save s --load l --lr 1e-5 --lr-decay-style cosine --clip-grad 0 --sde-window-range 1 4"""
    config = parse_config(flags.split())
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.sequence_parallel and config.model.bf16
    assert (config.training.micro_batch_size, config.training.train_iters) == (4, 10)
    assert (config.checkpoint.save, config.checkpoint.load) == ("s", "l")
    assert (config.optimizer.lr, config.optimizer.lr_decay_style) == (1e-5, "cosine")
    assert config.rollout.sde_window_range == (1, 4)


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["ocr"], {"ocr": 1.0}),
        (["brightness=0.7", "judge_score=0.3"], {"brightness": 0.7, "judge_score": 0.3}),
        (["brightness", "tools.mine:ugly=-2"], {"brightness": 1.0, "tools.mine:ugly": -2.0}),
    ],
)
def test_rewards_have_weights_alike_in_a_flag_and_in_a_file(words, weights, tmp_path):
    assert parse_config(["--reward", *words]).reward.reward == weights
    path = tmp_path / "run.yaml"
    path.write_text(f"reward: {{reward: {words[0] if words == ['ocr'] else weights}}}")
    assert parse_config(["--config", str(path)]).reward.reward == weights
    assert parse_config(["--config", str(path), "--reward", "ocr"]).reward.reward == {"ocr": 1.0}


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        ("ocr", {"ocr": 1}),
        ("ocr=0.7 judge_score=0.3", {"ocr": 0.7, "judge_score": 0.3}),
        ("my.module:attribute=-2 ocr", {"my.module:attribute": -2, "ocr": 1}),
    ],
)
def test_a_reward_or_several_with_weights(words, weights, file):
    for more in ([], ["--config", file]):
        config = parse_config([*more, "--reward", *words.split(), "--lr", "1"])
        assert config.reward.reward == weights and config.optimizer.lr == 1


def test_underscores_in_a_flag_are_accepted():
    assert parse_config(["--train_iters", "3"]).training.train_iters == 3


def test_flags_override_the_file_wherever_they_stand(file):
    for arguments in (["--config", file, "--lr", "3e-4"], ["--lr", "3e-4", f"--config={file}"]):
        config = parse_config(arguments)
        assert (config.optimizer.lr, config.training.train_iters) == (3e-4, 7)


def test_a_switch_that_the_file_sets_can_be_repeated_and_turned_off(file):
    assert parse_config(["--config", file, "--bf16"]).model.bf16
    assert not parse_config(["--config", file, "--no-bf16"]).model.bf16


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"'nowhere.yaml' cannot be read"):
        parse_config(["--config", "nowhere.yaml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-model-paralel-size", "2"], "--tensor-model-parallel-size"),
        (["--sde-type", "ode"], "invalid choice 'ode'"),
        (["--lr", "fast"], "--lr"),
        (["--train-iters", "1.5"], "--train-iters"),
        (["--config"], "--config"),
        (["--reward", "ocr=much"], "--reward"),
        (["--reward", "ocr=1", "ocr=2"], "--reward"),
        (["--reward", "ocr=much"], "--reward"),
        (["--reward", "ocr", "ocr=2"], "--reward"),
    ],
)
def test_a_mistaken_flag_exits_with_2_and_names_what_was_meant(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_config(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_lists_every_setting_with_its_group(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_config(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for group in fields(Config):
        assert f"{group.name.replace('_', '-')} options" in text
        for setting in fields(group.type):
            assert f"--{setting.name.replace('_', '-')}" in text
