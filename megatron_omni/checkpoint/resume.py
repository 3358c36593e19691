"""Which settings of a run may differ from those of the checkpoint it resumes."""

from dataclasses import asdict

from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError

MAY_CHANGE = frozenset(
    {
        "model.recompute_granularity",
        "model.recompute_method",
        "model.recompute_num_layers",
        "parallel.*",
        "optimizer.use_distributed_optimizer",
        "optimizer.overlap_grad_reduce",
        "optimizer.overlap_param_gather",
        "optimizer.optimizer_cpu_offload",
        "vllm_omni.*",
        "reward.eval_reward",
        "reward.reward_workers",
        "reward.reward_timeout",
        "judge.judge_urls",
        "judge.judge_concurrency",
        "judge.judge_timeout",
        "judge.judge_retries",
        "http.*",
        "data.eval_data",
        "training.train_iters",
        "training.eval_interval",
        "training.eval_samples",
        "checkpoint.*",
        "logging.*",
    }
)
"""The layout, the optimizer's included; where samples are drawn and scored; what is logged and saved;
evaluation; how long the run goes on."""


def check_config(saved: Config, current: Config) -> None:
    """Raise `UserError`, listing each `name: saved → current`, if a difference would make it another run."""
    before, now = _flat(saved), _flat(current)
    differences = [
        f"  {name}: {value!r} → {now[name]!r}"
        for name, value in before.items()
        if value != now[name] and MAY_CHANGE.isdisjoint({name, name.split(".")[0] + ".*"})
    ]
    if differences:
        raise UserError(
            "the checkpoint belongs to a run with other settings (saved → now):\n"
            + "\n".join(differences)
            + "\nRestore these to resume it, or start a new run with another folder for checkpoints."
        )


def _flat(config: Config) -> dict[str, object]:
    return {
        f"{group}.{name}": value
        for group, settings in asdict(config).items()
        for name, value in settings.items()
    }
