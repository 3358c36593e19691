"""Impossible settings are explained before anything is built; possible ones pass."""

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.config.schema import Config
from megatron_omni.config.validate import _RANGES, validate
from megatron_omni.errors import UserError


@pytest.fixture
def config(tmp_path):
    """A small configuration that is valid on up to four processes."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\n")
    config = Config()
    config.model.model_path, config.data.train_data = str(tmp_path), str(prompts)
    config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt = 4, 4
    config.training.micro_batch_size = 4
    return config


def _set(config, name, value):
    group, setting = name.split(".")
    setattr(getattr(config, group), setting, value)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_possible_configuration_passes(config, world_size):
    validate(config, world_size)


def test_no_arguments_give_one_line_on_what_is_missing():
    with pytest.raises(UserError) as caught:
        validate(Config(), 1)
    message = str(caught.value)
    assert "--model-path" in message and "--train-data" in message and "\n" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.model_path": "nowhere"}, "model_path 'nowhere' is not a folder"),
        ({"data.train_data": "nowhere"}, "train_data 'nowhere' is not a file"),
        ({"data.eval_data": "nowhere"}, "eval_data 'nowhere' is not a file"),
        ({"reward.eval_reward": "ocr"}, "need eval_data"),
        ({"reward.reward": {}}, "reward names no reward"),
        ({"reward.reward": {"ocr": 0.0}}, "weight of reward 'ocr' must be a number other than 0, not 0.0"),
        ({"reward.reward": {"ocr": float("nan")}}, "weight of reward 'ocr'"),
        ({"judge.judge_urls": ()}, "judge_urls names no server"),
        ({"http.http_urls": ("localhost:8100",)}, "http_urls 'localhost:8100' must begin with http://"),
        ({"vllm_omni.rollout_urls": ("node7:9000",)}, "rollout_urls 'node7:9000' must begin with http://"),
        ({"vllm_omni.weight_transfer": "folder"}, "weight_transfer folder needs weight_transfer_folder"),
        ({"vllm_omni.lora_transfer": "adapter"}, "lora_transfer adapter needs lora_rank"),
        ({"vllm_omni.rollout_tensor_parallel_size": 2}, "more than the 1 processes of a replica"),
        ({"judge.judge_templates": "nowhere"}, "judge_templates 'nowhere' is not a folder"),
        ({"judge.judge_concurrency": 0}, "judge_concurrency must be at least 1"),
        ({"http.http_retries": -1}, "http_retries must not be negative"),
        ({"training.micro_batch_size": 0}, "micro_batch_size must be at least 1, not 0"),
        ({"rollout.height": -16}, "height must be at least 1, not -16"),
        ({"rollout.num_inference_steps": 1}, "num_inference_steps must be at least 2"),
        ({"rollout.timestep_fraction": 0.0}, "timestep_fraction must be more than 0 and at most 1, not 0.0"),
        ({"rollout.timestep_fraction": 1.5}, "timestep_fraction"),
        ({"optimizer.lr": float("nan")}, "lr"),
        ({"optimizer.adam_beta2": 1.0}, "adam_beta2 must be at least 0 and less than 1"),
        ({"model.recompute_method": "block"}, "recompute_method block needs recompute_granularity full"),
        (
            {"model.recompute_granularity": "selective", "model.recompute_num_layers": 2},
            "recompute_num_layers 2 needs recompute_granularity full",
        ),
        ({"parallel.sequence_parallel": True}, "sequence_parallel needs tensor_model_parallel_size above 1"),
        ({"parallel.tensor_model_parallel_size": 3}, "3 does not divide them"),
        ({"parallel.pipeline_model_parallel_size": 2, "parallel.context_parallel_size": 4}, "= 8 does not"),
        ({"parallel.num_virtual_stages_per_pipeline_rank": 2}, "pipeline_model_parallel_size above 1"),
        ({"parallel.context_parallel_size": 4, "parallel.ulysses_degree_in_cp": 3}, "3 does not divide"),
        ({"parallel.pipeline_model_parallel_size": 2, "model.batch_invariant": True}, "set micro_batch_size"),
        ({"optimizer.overlap_param_gather": True}, "overlap_param_gather needs use_distributed_optimizer"),
        ({"optimizer.optimizer_cpu_offload": True}, "optimizer_cpu_offload needs bf16"),
        ({"optimizer.grad_reduce_in_bf16": True}, "grad_reduce_in_bf16 needs bf16"),
        ({"optimizer.lr_warmup_iters": 100}, "lr_warmup_iters 100 must be less than lr_decay_iters, 100"),
        ({"checkpoint.keep_last_checkpoints": -1}, "keep_last_checkpoints must not be negative"),
        ({"rollout.rollout_batch_size": 6}, "make it a multiple of 4"),
        ({"training.micro_batch_size": 3}, "each process draws 4 samples"),
        ({"algorithm.updates_per_iteration": 2}, r"micro_batch_size 4 × updates_per_iteration 2 = 8"),
        ({"rollout.sde_window_size": 10}, "sde_window_size 10 exceeds the 9 steps"),
        ({"rollout.sde_window_range": (2, 10), "rollout.sde_window_size": 2}, "must lie within 0 9"),
        ({"rollout.sde_window_range": (5, 2)}, "must lie within 0 9"),
        ({"rollout.sde_window_range": (-1, 2)}, "must lie within 0 9"),
        ({"rollout.sde_window_range": (1, 3), "rollout.sde_window_size": 3}, "exceeds the 2 steps"),
    ],
)  # fmt: skip
def test_an_impossible_setting_is_explained(config, changes, message):
    for name, value in changes.items():
        _set(config, name, value)
    with pytest.raises(UserError, match=message):
        validate(config, 4)


def test_all_faults_are_reported_at_once(config):
    config.model.model_path, config.parallel.sequence_parallel = "nowhere", True
    with pytest.raises(UserError) as caught:
        validate(config, 4)
    assert len(str(caught.value).splitlines()) == 2


def test_ranges_name_settings_that_exist():
    groups = asdict(Config())
    for _, holds, names in _RANGES:
        for group, setting in (name.split(".") for name in names.split()):
            assert holds(groups[group][setting])


@given(
    world_size=st.integers(1, 8),
    tensor_parallel=st.integers(1, 4),
    pipeline=st.integers(1, 2),
    context=st.integers(1, 2),
    prompts=st.integers(1, 16),
    group=st.integers(1, 8),
    micro_batch=st.integers(1, 8),
    updates=st.integers(1, 4),
)
def test_whatever_passes_splits_evenly(
    tmp_path_factory, world_size, tensor_parallel, pipeline, context, prompts, group, micro_batch, updates
):
    folder = tmp_path_factory.getbasetemp()
    (folder / "prompts.txt").touch()
    config = Config()
    config.model.model_path, config.data.train_data = str(folder), str(folder / "prompts.txt")
    config.parallel.tensor_model_parallel_size = tensor_parallel
    config.parallel.pipeline_model_parallel_size = pipeline
    config.parallel.context_parallel_size = context
    config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt = prompts, group
    config.training.micro_batch_size, config.algorithm.updates_per_iteration = micro_batch, updates
    data_parallel = world_size / (tensor_parallel * pipeline * context)
    micro_batches = prompts / data_parallel * group / micro_batch / updates
    even = data_parallel.is_integer() and prompts % data_parallel == 0 and micro_batches.is_integer()
    try:
        validate(config, world_size)
    except UserError:
        assert not even
    else:
        assert even
