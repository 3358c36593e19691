"""The parts of a run, built from its configuration."""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_omni.algorithms.base import Algorithm
from megatron_omni.algorithms.registry import ALGORITHMS
from megatron_omni.cache import BatchCache
from megatron_omni.checkpoint.adapter import load_adapter
from megatron_omni.checkpoint.distributed import load_release
from megatron_omni.checkpoint.hf import load_hf
from megatron_omni.config.schema import Config
from megatron_omni.data.prompts import PromptSet
from megatron_omni.models.base import ImageSize, ModelFamily
from megatron_omni.models.layers.lora import add_adapters
from megatron_omni.models.registry import MODELS
from megatron_omni.parallel.pipeline import ForwardPipeline
from megatron_omni.parallel.state import Layout
from megatron_omni.rewards.options import RewardOptions
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rollout.base import RolloutEngine
from megatron_omni.rollout.megatron.engine import MegatronEngine
from megatron_omni.rollout.parts import EngineParts
from megatron_omni.rollout.registry import ENGINES
from megatron_omni.rollout.weights import PolicyWeights
from megatron_omni.sampling.guidance import Guidance
from megatron_omni.training.evaluation import Evaluator
from megatron_omni.training.memory import MemoryEstimate, Workload, estimate
from megatron_omni.training.optimizer import Optimization, build_optimization
from megatron_omni.training.reference import Reference
from megatron_omni.training.scoring import Scorer
from megatron_omni.training.update import Updater

CACHED_PROMPTS = 8192


@dataclass(frozen=True)
class Parts:
    """The parts of a run, on this process."""

    family: ModelFamily
    optimization: Optimization
    memory: MemoryEstimate
    """Of this process, while it trains."""
    prompts: PromptSet
    engine: RolloutEngine
    algorithm: Algorithm
    scorer: Scorer | None
    """None where the algorithm uses no rewards and nothing is evaluated."""
    updater: Updater
    evaluator: Evaluator | None
    """None without held-out prompts."""

    def close(self) -> None:
        """Ends the scoring processes and the rollout engine."""
        self.engine.close()
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

    guidance = Guidance(config.rollout.true_cfg_scale, config.model.batch_invariant)
    chunks = build_model(config, family, folder, layout)
    if config.lora.lora_rank:
        add_adapters(chunks, family.mapping, config.lora, config.training.seed)
        if config.lora.lora_path:
            load_adapter(chunks, family.mapping, config.lora, Path(config.lora.lora_path))
    policy = ForwardPipeline(chunks, guidance.forward, dtype)
    reference = None
    if algorithm.needs_reference:
        reference = build_reference(config, family, folder, layout, policy)
    embeddings = BatchCache(pipeline.encode_prompts, CACHED_PROMPTS)
    networks = list(pipeline.networks)
    if reference and not (config.lora.lora_rank or config.algorithm.offload_reference):
        networks += reference.pipeline.chunks
    work = workload(config, layout, algorithm, prompts, embeddings, pipeline.latent_channels, size)
    memory = estimate(config, layout, chunks, work, networks)
    optimization = build_optimization(config, chunks)
    weights = PolicyWeights(chunks, family.mapping, config.lora, optimization.gather_parameters)
    parts = EngineParts(config, layout, policy, weights, pipeline, embeddings)
    engine = ENGINES.get(config.rollout.rollout_engine)(parts)
    return Parts(
        family=family,
        optimization=optimization,
        memory=memory,
        prompts=prompts,
        engine=engine,
        algorithm=algorithm,
        scorer=scorer,
        updater=Updater(
            optimization,
            policy,
            algorithm,
            guidance,
            embeddings,
            config.rollout.negative_prompt,
            size,
            reference,
            layout,
        ),
        evaluator=Evaluator(
            config,
            layout,
            engine if engine.samples_policy else MegatronEngine(parts),
            heldout,
            scorer,
            open_heldout_scorer(config, layout, heldout),
        )
        if heldout
        else None,
    )


def build_model(config: Config, family: ModelFamily, folder: Path, layout: Layout) -> list[torch.nn.Module]:
    """This process's chunks of the Megatron module on its device, with the folder's weights."""
    chunks = []
    for number, stage in enumerate(layout.stages):
        chunk = family.build_model(folder, config.model, config.parallel, stage).to(layout.device)
        chunk.vp_stage = number if layout.chunks > 1 else None
        chunks.append(chunk)
    load_hf(chunks, family.mapping, folder / family.transformer_folder)
    return chunks


def workload(
    config: Config,
    layout: Layout,
    algorithm: Algorithm,
    prompts: PromptSet,
    embeddings: BatchCache,
    latent_channels: int,
    size: ImageSize,
) -> Workload:
    """An update's work, with as much text as the longest prompt has."""
    longest = max(prompts.rows, key=lambda row: len(row.prompt))
    (text,) = embeddings([longest.prompt])
    trained_steps = len(algorithm.requests(0, [longest.metadata], 0)[0].trained)
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt // layout.data_size
    micro_batches = samples // config.training.micro_batch_size // config.algorithm.updates_per_iteration
    return Workload(
        rows=config.training.micro_batch_size * (2 if config.rollout.true_cfg_scale != 1 else 1),
        text_tokens=len(text),
        image_tokens=size.height * size.width,
        text_channels=text.shape[1],
        latent_channels=latent_channels,
        micro_batches=micro_batches * max(1, trained_steps),
    )


def build_reference(
    config: Config, family: ModelFamily, folder: Path, layout: Layout, policy: ForwardPipeline
) -> Reference:
    """The policy before training: without its adapters, or a frozen copy."""
    if config.lora.lora_rank:
        return Reference.without_adapters(policy)
    frozen = [chunk.requires_grad_(False).eval() for chunk in build_model(config, family, folder, layout)]
    if config.algorithm.ref_load:
        load_release(frozen, Path(config.algorithm.ref_load), family.name)
    pipeline = ForwardPipeline(frozen, policy.forward, policy.dtype)
    if config.algorithm.offload_reference:
        return Reference.on_host(pipeline, layout.device)
    return Reference(pipeline)


def open_scorer(
    config: Config, layout: Layout, weights: dict[str, float], *prompts: PromptSet | None
) -> Scorer:
    """The rewards' worker processes; they check at once that every prompt can be scored."""
    workers, timeout = config.reward.reward_workers, config.reward.reward_timeout
    options = RewardOptions(config.judge, config.http)
    scorer = Scorer(layout, weights, lambda name: RewardPool(name, workers, timeout, options))
    scorer.check_prompts([row.metadata for each in prompts if each for row in each.rows])
    return scorer


def open_heldout_scorer(config: Config, layout: Layout, heldout: PromptSet) -> Scorer | None:
    judge = config.reward.eval_reward
    return open_scorer(config, layout, {judge: 1.0}, heldout) if judge else None
