"""Every setting of a run. The flags, their help and the reference page are made from here."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


def _weights(value: Any) -> Any:
    return {value: 1.0} if isinstance(value, str) else value


RewardWeights = Annotated[dict[str, float], BeforeValidator(_weights)]
"""Names and weights; in a file a lone name stands for itself with weight 1."""


@dataclass
class ModelConfig:
    """Which model, and how its blocks are computed."""

    model: str = "qwen_image"
    """Model family: a registered name or a 'package.module:attribute' path."""
    model_path: str = ""
    """Hugging Face (diffusers) folder with the weights to start from, the text encoder and the VAE."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Backend of linear and norm layers; auto takes Transformer Engine where it is installed."""
    bf16: bool = False
    """Compute in bfloat16 with float32 master weights; otherwise float32 throughout."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activation recomputation: full recomputes whole layers, selective the attention cores."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """Full recomputation of all layers, in chunks (uniform), or of each stage's first ones (block)."""
    recompute_num_layers: int = 1
    """With full recomputation: layers in a chunk (uniform), or layers recomputed, one by one (block)."""
    batch_invariant: bool = False
    """Run samples one by one, so that replay is exact for every micro-batch size. Slower; see the docs."""


@dataclass
class ParallelConfig:
    """How a model and its samples are spread over processes. Data parallelism takes what is left."""

    tensor_model_parallel_size: int = 1
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = False
    """Also split activations along the sequence between those processes."""
    pipeline_model_parallel_size: int = 1
    """Stages that share the layers."""
    num_virtual_stages_per_pipeline_rank: int = 1
    """Chunks of layers a process holds, interleaved with the others' (a smaller pipeline bubble)."""
    context_parallel_size: int = 1
    """Processes that share each sample's tokens (USP: Ulysses × ring)."""
    ulysses_degree_in_cp: int | None = None
    """Ulysses' part of context parallelism, a ring does the rest; by default Ulysses alone."""
    distributed_timeout_minutes: float = 10.0
    """A process that hears nothing from its peers for so long ends with an error."""


@dataclass
class AlgorithmConfig:
    """The policy-gradient algorithm and its constants."""

    algorithm: str = "flow_grpo"
    """Algorithm: a registered name or a 'package.module:attribute' path."""
    clip_range: float = 1e-4
    """Clip range ε of the probability ratio."""
    adv_clip_max: float = 5.0
    """Advantages are clamped to ± this value."""
    global_std: bool = False
    """Divide advantages by the standard deviation of the whole batch instead of the group's."""
    kl_coefficient: float = 0.0
    """Weight β of the KL penalty to the initial weights; 0 keeps no reference copy."""
    ref_load: str = ""
    """Folder of a `release` checkpoint with the reference weights of that penalty; else model_path's."""
    offload_reference: bool = False
    """Keep that copy in host memory while it is not used. With LoRA there is no copy."""
    updates_per_iteration: int = 1
    """Optimizer steps an iteration; each takes an equal share of the samples."""


@dataclass
class RolloutConfig:
    """How samples are drawn."""

    rollout_engine: str = "megatron"
    """Rollout engine: a registered name or a 'package.module:attribute' path."""
    rollout_batch_size: int = 16
    """Prompts an iteration, over all processes."""
    n_samples_per_prompt: int = 16
    """Samples of each prompt: the size of a group."""
    height: int = 512
    """Image height in pixels."""
    width: int = 512
    """Image width in pixels."""
    num_inference_steps: int = 10
    """Denoising steps while training."""
    true_cfg_scale: float = 1.0
    """Classifier-free guidance scale; 1 is off. Training takes gradients through both branches."""
    negative_prompt: str = " "
    """Prompt of the unguided branch."""
    sde_type: Literal["sde", "dance", "cps"] = "sde"
    """Kind of the stochastic step."""
    noise_level: float = 0.7
    """Noise level η of the stochastic step."""
    sde_window_size: int = 0
    """Stochastic steps in a group's window; 0 makes all steps but the last stochastic."""
    sde_window_range: tuple[int, int] | None = None
    """First and last-plus-one step a window may cover; by default all steps but the last."""
    timestep_fraction: float = 1.0
    """Random share of a group's stochastic steps that is trained."""
    share_initial_noise: bool = False
    """All samples of a group start from the same noise."""


@dataclass
class VllmOmniConfig:
    """The rollout engine vllm_omni: engines in processes of their own, to which weights are sent."""

    rollout_urls: tuple[str, ...] = ()
    """Engines that run already, a multiple of the data-parallel size; else each replica starts its own."""
    rollout_python: str = ".venv-rollout/bin/python"
    """Python of the environment that vLLM-Omni is installed in, for engines that the run starts."""
    rollout_tensor_parallel_size: int = 1
    """Workers of each engine. A replica starts as many engines as its devices have room for."""
    rollout_max_num_seqs: int = 8
    """Samples that an engine draws together, step by step."""
    recompute_log_probs: bool = True
    """Start probability ratios from the trainer's own log-probabilities, instead of from the engine's."""
    rollout_timeout: float = 600.0
    """Seconds without an answer after which an engine counts as hung; also the time it has to start."""
    rollout_restarts: int = 3
    """Times that an engine may be lost without having drawn anything in between, before the run gives up."""
    weight_transfer: Literal["shared_memory", "process_group", "folder"] = "shared_memory"
    """How weights reach the engine: shared_memory on one host, process_group or folder between hosts."""
    weight_transfer_bucket_mib: int = 512
    """Memory for weights on their way."""
    weight_transfer_folder: str = ""
    """For folder: one that the engines see as well."""
    lora_transfer: Literal["merged", "adapter"] = "merged"
    """With LoRA, send the whole model with the adapters merged into it, or the adapters alone."""


@dataclass
class RewardConfig:
    """How samples are scored."""

    reward: RewardWeights = field(default_factory=lambda: {"ocr": 1.0})
    """Reward: a registered name or a 'package.module:attribute' path. Several have a weight each."""
    reward_combination: Literal["sum", "separate"] = "sum"
    """Several rewards: add the weighted values, or the weighted advantages that each gives by itself."""
    eval_reward: str | None = None
    """A second reward, logged at each evaluation and never trained on."""
    reward_workers: int = 1
    """Scoring processes of each reward on each host process; they overlap with sampling."""
    reward_timeout: float = 60.0
    """Seconds a process may take over a batch before its samples count as failed."""


@dataclass
class JudgeConfig:
    """Vision-language models as judges (rewards judge_ocr and judge_score), over the OpenAI API."""

    judge_urls: tuple[str, ...] = ("http://127.0.0.1:8000/v1",)
    """Servers with the same model, between which requests are spread."""
    judge_model: str = "Qwen/Qwen3-VL-8B-Instruct"
    """The model's name on those servers."""
    judge_templates: str = ""
    """Folder with your own prompt templates, named as the packaged ones; empty for those."""
    judge_concurrency: int = 32
    """Requests that one scoring process has in flight at most."""
    judge_timeout: float = 60.0
    """Seconds to wait for an answer."""
    judge_retries: int = 5
    """How often a request is sent again after no answer or a busy or faulty server."""


@dataclass
class HttpRewardConfig:
    """The reward http: scored by servers started with python -m megatron_omni.rewards.server."""

    http_urls: tuple[str, ...] = ("http://127.0.0.1:8100",)
    """Servers with the same reward, between which batches are spread."""
    http_concurrency: int = 4
    """Batches that one scoring process has in flight at most."""
    http_timeout: float = 60.0
    """Seconds to wait for a batch's scores."""
    http_retries: int = 5
    """How often a batch is sent again after no answer or a busy or faulty server."""


@dataclass
class DataConfig:
    """Prompts (and images, for supervised training)."""

    train_data: str = ""
    """Training set: a text file with a prompt a line, or .jsonl rows with "prompt" and metadata."""
    eval_data: str = ""
    """Held-out set in the same form; empty for no evaluation."""


@dataclass
class OptimizerConfig:
    """Adam on float32 master weights, with warm-up and decay."""

    lr: float = 1e-5
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"
    """Shape of the decay after warm-up; WSD stays flat, then falls linearly."""
    lr_decay_iters: int | None = None
    """Iteration at which decay ends; by default train_iters."""
    lr_wsd_decay_iters: int = 0
    """Iterations of the fall at the end of WSD."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up from zero."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: float = 0.9
    """First-moment decay."""
    adam_beta2: float = 0.999
    """Second-moment decay."""
    adam_eps: float = 1e-8
    """Adam's ε."""
    clip_grad: float = 1.0
    """Global gradient norm is clipped to this; 0 is off."""
    use_distributed_optimizer: bool = False
    """Spread master weights and moments over the data-parallel processes instead of keeping them on each."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel processes while the backward pass goes on."""
    overlap_param_gather: bool = False
    """With the distributed optimizer, gather updated weights while the next forward pass goes on."""
    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16, not float32: half the memory, less exact."""
    optimizer_cpu_offload: bool = False
    """With the distributed optimizer, keep master weights and moments in host memory, updated there."""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA) trained in place of the model's own weights."""

    lora_rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    lora_alpha: float = 64.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapters while training; above 0 replay is no longer exact."""
    lora_target_modules: tuple[str, ...] = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
    """Linear layers to adapt, by (parts of) their Hugging Face names; * and ? work as in the shell."""
    lora_path: str = ""
    """Folder of an adapter to go on from, as PEFT or diffusers save it."""


@dataclass
class TrainingConfig:
    """The loop."""

    train_iters: int = 100
    """Iterations of rollout, reward and update."""
    micro_batch_size: int = 16
    """Samples in one forward pass, while sampling and while training: sharing it makes replay exact."""
    seed: int = 0
    """Seed of everything random."""
    eval_interval: int = 10
    """Iterations between evaluations."""
    eval_samples: int = 128
    """Held-out prompts in an evaluation."""


@dataclass
class CheckpointConfig:
    """Training checkpoints."""

    save: str = ""
    """Folder for checkpoints; by default checkpoints/ in the run's folder."""
    load: str = ""
    """Folder to resume from. If it holds no checkpoint yet, the run starts from model_path."""
    save_interval: int = 0
    """Iterations between checkpoints; 0 saves only at the end."""
    async_save: bool = False
    """Train on while a checkpoint, copied to host memory, is being written."""
    keep_last_checkpoints: int = 0
    """Checkpoints to keep, the newest ones and the best; 0 keeps all."""
    save_hf: bool = False
    """With each checkpoint, also write the model in Hugging Face form to hf/ in the checkpoint's folder."""
    export_hf: bool = False
    """At the end, write the model in Hugging Face form to hf/ in the run's folder."""


@dataclass
class LoggingConfig:
    """What is written where."""

    run_name: str = "run"
    """Name of the run; its folder is OUTPUT_DIR/RUN_NAME."""
    output_dir: str = "runs"
    """Folder that holds runs."""
    sample_images: int = 16
    """Fixed held-out prompts whose pictures are kept at each evaluation."""
    tensorboard: bool = True
    """Write TensorBoard events to the run's folder."""
    wandb_project: str = ""
    """Log to this wandb project too (WANDB_MODE=offline works); empty for none."""


@dataclass
class Config:
    """A whole run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    vllm_omni: VllmOmniConfig = field(default_factory=VllmOmniConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    http: HttpRewardConfig = field(default_factory=HttpRewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
