"""Settings that cannot work, explained before anything is built."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError

_RANGES: list[tuple[str, Callable[[float], bool], str]] = [
    (
        "must be at least 1",
        lambda value: value >= 1,
        "parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size "
        "parallel.num_virtual_stages_per_pipeline_rank parallel.context_parallel_size "
        "model.recompute_num_layers algorithm.updates_per_iteration "
        "rollout.rollout_batch_size rollout.n_samples_per_prompt rollout.height rollout.width "
        "rollout.true_cfg_scale vllm_omni.rollout_tensor_parallel_size vllm_omni.rollout_max_num_seqs "
        "vllm_omni.weight_transfer_bucket_mib reward.reward_workers judge.judge_concurrency "
        "http.http_concurrency training.train_iters training.micro_batch_size training.eval_interval "
        "training.eval_samples",
    ),
    (
        "must be at least 2, since the last step is never stochastic",
        lambda value: value >= 2,
        "rollout.num_inference_steps",
    ),
    (
        "must be positive",
        lambda value: value > 0,
        "parallel.distributed_timeout_minutes algorithm.clip_range algorithm.adv_clip_max "
        "rollout.noise_level vllm_omni.rollout_timeout reward.reward_timeout judge.judge_timeout "
        "http.http_timeout optimizer.adam_eps lora.lora_alpha",
    ),
    (
        "must not be negative",
        lambda value: value >= 0,
        "algorithm.kl_coefficient rollout.sde_window_size optimizer.lr optimizer.min_lr "
        "optimizer.lr_warmup_iters optimizer.weight_decay optimizer.clip_grad training.seed "
        "checkpoint.save_interval checkpoint.keep_last_checkpoints logging.sample_images "
        "lora.lora_rank vllm_omni.rollout_restarts judge.judge_retries http.http_retries",
    ),
    (
        "must be at least 0 and less than 1",
        lambda value: 0 <= value < 1,
        "optimizer.adam_beta1 optimizer.adam_beta2 lora.lora_dropout",
    ),
    ("must be more than 0 and at most 1", lambda value: 0 < value <= 1, "rollout.timestep_fraction"),
]


def validate(config: Config, world_size: int) -> None:
    """Raise a `UserError` that lists all settings and combinations impossible on `world_size` processes."""
    for check in (_missing, _out_of_range, lambda config: _impossible(config, world_size)):
        if faults := list(check(config)):
            raise UserError("\n".join(faults))


def _missing(config: Config) -> Iterator[str]:
    absent = []
    if not config.model.model_path:
        absent.append("--model-path (a Hugging Face folder with the model)")
    if not config.data.train_data:
        absent.append("--train-data (a file of prompts)")
    if absent:
        yield f"give {' and '.join(absent)}, as flags or in a --config file; --help lists every setting"


def _out_of_range(config: Config) -> Iterator[str]:
    groups = asdict(config)
    for rule, holds, names in _RANGES:
        for name in names.split():
            group, setting = name.split(".")
            value = groups[group][setting]
            if not (math.isfinite(value) and holds(value)):
                yield f"{setting} {rule}, not {value}"


def _impossible(config: Config, world_size: int) -> Iterator[str]:
    yield from _paths(config)
    yield from _rewards(config)
    yield from _engine(config)
    yield from _recomputation(config)
    yield from _layout(config, world_size)
    yield from _window(config)
    yield from _optimizer(config)


def _paths(config: Config) -> Iterator[str]:
    if not Path(config.model.model_path).is_dir():
        yield f"model_path {config.model.model_path!r} is not a folder"
    for name in ("train_data", "eval_data"):
        path = getattr(config.data, name)
        if path and not Path(path).is_file():
            yield f"{name} {path!r} is not a file"
    adapter = config.lora.lora_path
    if adapter and not config.lora.lora_rank:
        yield f"lora_path {adapter!r} needs lora_rank, the rank of its adapters"
    elif adapter and not Path(adapter).is_dir():
        yield f"lora_path {adapter!r} is not a folder"
    if config.reward.eval_reward and not config.data.eval_data:
        yield f"eval_reward {config.reward.eval_reward!r} is logged at evaluations, which need eval_data"


def _rewards(config: Config) -> Iterator[str]:
    if not config.reward.reward:
        yield "reward names no reward"
    for name, weight in config.reward.reward.items():
        if not math.isfinite(weight) or weight == 0:
            yield f"the weight of reward {name!r} must be a number other than 0, not {weight}"
    for setting, urls in (("judge_urls", config.judge.judge_urls), ("http_urls", config.http.http_urls)):
        if not urls:
            yield f"{setting} names no server"
        yield from _urls(setting, urls)
    templates = config.judge.judge_templates
    if templates and not Path(templates).is_dir():
        yield f"judge_templates {templates!r} is not a folder"


def _urls(setting: str, urls: tuple[str, ...]) -> Iterator[str]:
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"{setting} {url!r} must begin with http:// or https://"


def _engine(config: Config) -> Iterator[str]:
    settings, parallel = config.vllm_omni, config.parallel
    yield from _urls("rollout_urls", settings.rollout_urls)
    if settings.weight_transfer == "folder" and not settings.weight_transfer_folder:
        yield "weight_transfer folder needs weight_transfer_folder"
    if settings.lora_transfer == "adapter" and not config.lora.lora_rank:
        yield "lora_transfer adapter needs lora_rank: without adapters the whole model is sent"
    replica = (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * parallel.context_parallel_size
    )
    if settings.rollout_tensor_parallel_size > replica and not settings.rollout_urls:
        yield (
            f"rollout_tensor_parallel_size {settings.rollout_tensor_parallel_size} is more than the "
            f"{replica} processes of a replica: lower it, or name engines that run elsewhere in rollout_urls"
        )


def _recomputation(config: Config) -> Iterator[str]:
    if config.model.recompute_granularity == "full":
        return
    for name, default in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
        if (value := getattr(config.model, name)) != default:
            yield f"{name} {value} needs recompute_granularity full"


def _layout(config: Config, world_size: int) -> Iterator[str]:
    """Processes, and how they share the samples of an iteration."""
    parallel = config.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    if parallel.sequence_parallel and tensor == 1:
        yield "sequence_parallel needs tensor_model_parallel_size above 1"
    if parallel.num_virtual_stages_per_pipeline_rank > 1 and pipeline == 1:
        yield "num_virtual_stages_per_pipeline_rank needs pipeline_model_parallel_size above 1"
    if config.model.batch_invariant and pipeline > 1:
        yield "batch_invariant needs pipeline_model_parallel_size 1; set micro_batch_size 1 instead"
    ulysses = parallel.ulysses_degree_in_cp
    if ulysses is not None and (ulysses < 1 or context % ulysses):
        yield f"ulysses_degree_in_cp {ulysses} does not divide context_parallel_size {context}"
    if world_size % (tensor * pipeline * context):
        yield (
            f"{world_size} processes cannot be shared: tensor_model_parallel_size {tensor} × "
            f"pipeline_model_parallel_size {pipeline} × context_parallel_size {context} = "
            f"{tensor * pipeline * context} does not divide them"
        )
        return
    data_parallel = world_size // (tensor * pipeline * context)
    prompts, group = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    if prompts % data_parallel:
        yield (
            f"rollout_batch_size {prompts} cannot be shared evenly by {data_parallel} data-parallel "
            f"processes; make it a multiple of {data_parallel}"
        )
        return
    samples = prompts * group // data_parallel
    micro_batch, updates = config.training.micro_batch_size, config.algorithm.updates_per_iteration
    if samples % (micro_batch * updates):
        yield (
            f"each process draws {samples} samples an iteration (rollout_batch_size {prompts} × "
            f"n_samples_per_prompt {group} / {data_parallel} data-parallel), which must be a multiple of "
            f"micro_batch_size {micro_batch} × updates_per_iteration {updates} = {micro_batch * updates}"
        )


def _window(config: Config) -> Iterator[str]:
    """Stochastic steps: the last step is never one."""
    size, stochastic = config.rollout.sde_window_size, config.rollout.num_inference_steps - 1
    first, stop = config.rollout.sde_window_range or (0, stochastic)
    if not 0 <= first < stop <= stochastic:
        yield f"sde_window_range {first} {stop} must lie within 0 {stochastic}, all steps but the last"
    elif size > stop - first:
        yield f"sde_window_size {size} exceeds the {stop - first} steps it may cover, {first} to {stop - 1}"


def _optimizer(config: Config) -> Iterator[str]:
    settings = config.optimizer
    for name in ("overlap_param_gather", "optimizer_cpu_offload"):
        if getattr(settings, name) and not settings.use_distributed_optimizer:
            yield f"{name} needs use_distributed_optimizer"
    if settings.overlap_param_gather and not settings.overlap_grad_reduce:
        yield "overlap_param_gather needs overlap_grad_reduce"
    if settings.optimizer_cpu_offload and not config.model.bf16:
        yield "optimizer_cpu_offload needs bf16: a float32 model is its own master weights"
    if settings.grad_reduce_in_bf16 and not config.model.bf16:
        yield "grad_reduce_in_bf16 needs bf16: the gradients of a float32 model are float32"
    decay = settings.lr_decay_iters or config.training.train_iters
    if settings.lr_warmup_iters >= decay:
        yield f"lr_warmup_iters {settings.lr_warmup_iters} must be less than lr_decay_iters, {decay}"
