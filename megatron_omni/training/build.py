"""The parts of a run, built from its configuration."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_omni.algorithms.base import Algorithm
from megatron_omni.algorithms.registry import ALGORITHMS
from megatron_omni.cache import BatchCache
from megatron_omni.checkpoint.hf import load_hf
from megatron_omni.config.schema import Config
from megatron_omni.data.prompts import PromptSet
from megatron_omni.models.base import ModelFamily
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.state import Layout
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rollout.base import RolloutEngine
from megatron_omni.rollout.megatron.engine import MegatronEngine
from megatron_omni.rollout.registry import ENGINES
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.evaluation import Evaluator
from megatron_omni.training.optimizer import Optimization, build_optimization
from megatron_omni.training.scoring import Scorer
from megatron_omni.training.update import Updater

CACHED_PROMPTS = 8192


@dataclass(frozen=True)
class Parts:
    """The parts of a run, on this process."""

    family: ModelFamily
    optimization: Optimization
    prompts: PromptSet
    engine: RolloutEngine
    algorithm: Algorithm
    scorer: Scorer | None
    """None where the algorithm uses no rewards and nothing is evaluated."""
    updater: Updater
    evaluator: Evaluator | None
    """None without held-out prompts."""

    def close(self) -> None:
        """Ends the scoring processes."""
        for scorer in (self.scorer, self.evaluator and self.evaluator.heldout_scorer):
            if scorer:
                scorer.close()


def build_parts(config: Config, layout: Layout) -> Parts:
    """Builds every part; raises `UserError` for input that cannot work, before anything is trained."""
    folder = Path(config.model.model_path)
    family = MODELS.get(config.model.model)
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    pipeline = family.open_pipeline(folder, layout.device, dtype)
    size = pipeline.latent_size(config.rollout.height, config.rollout.width)
    sigmas = pipeline.sigmas(config.rollout.num_inference_steps, size)
    algorithm = ALGORITHMS.get(config.algorithm.algorithm)(config, sigmas)
    prompts = PromptSet.from_file(config.data.train_data)
    heldout = PromptSet.from_file(config.data.eval_data) if config.data.eval_data else None
    scorer = None
    if algorithm.uses_rewards or heldout:
        scorer = open_scorer(config, layout, config.reward.reward, prompts, heldout)

    model = build_model(config, family, folder, layout)
    reference = None
    if algorithm.needs_reference:
        reference = build_model(config, family, folder, layout).requires_grad_(False).eval()
    optimization = build_optimization(config, model)
    embeddings = BatchCache(pipeline.encode_prompts, CACHED_PROMPTS)
    guidance = Guidance(config.rollout.true_cfg_scale, config.model.batch_invariant)
    parts = (config, model, pipeline, embeddings, layout.device)
    return Parts(
        family=family,
        optimization=optimization,
        prompts=prompts,
        engine=ENGINES.get(config.rollout.rollout_engine)(*parts),
        algorithm=algorithm,
        scorer=scorer,
        updater=Updater(
            optimization, algorithm, guidance, embeddings, config.rollout.negative_prompt, size, reference
        ),
        evaluator=Evaluator(
            config,
            layout,
            MegatronEngine(*parts),
            heldout,
            scorer,
            open_heldout_scorer(config, layout, heldout),
        )
        if heldout
        else None,
    )


def build_model(config: Config, family: ModelFamily, folder: Path, layout: Layout) -> torch.nn.Module:
    """The Megatron module on this rank's device, with the folder's weights."""
    model = family.build_model(folder, config.model, config.parallel).to(layout.device)
    load_hf(model, family.mapping, folder / family.transformer_folder)
    return model


def open_scorer(config: Config, layout: Layout, reward: str, *prompts: PromptSet | None) -> Scorer:
    """The reward's worker processes; they check at once that every prompt can be scored."""
    scorer = Scorer(
        layout, lambda: RewardPool(reward, config.reward.reward_workers, config.reward.reward_timeout)
    )
    if scorer.pool:
        scorer.pool.check_prompts(row.metadata for each in prompts if each for row in each.rows)
    return scorer


def open_heldout_scorer(config: Config, layout: Layout, heldout: PromptSet) -> Scorer | None:
    return (
        open_scorer(config, layout, config.reward.eval_reward, heldout) if config.reward.eval_reward else None
    )
