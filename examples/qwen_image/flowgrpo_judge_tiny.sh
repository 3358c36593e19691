#!/usr/bin/env bash
# Flow-GRPO as in production, on two CPU cores in a few minutes: two tensor-parallel training processes, vLLM-Omni
# as the rollout engine, and a vision-language judge in vLLM. Both models are random and tiny. Sets up both
# environments where they are missing (VENV and ROLLOUT_VENV name others), and leaves
# runs/flowgrpo_judge_tiny/metrics.jsonl. Arguments go to pretrain_rl.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/venv.sh
source examples/qwen_image/judge.sh
VENV=${VENV:-.venv}
ROLLOUT_VENV=${ROLLOUT_VENV:-.venv-rollout}
make_venv "$VENV" requirements.txt
make_rollout_venv "$ROLLOUT_VENV"
models=build/flowgrpo_judge_tiny
"$VENV/bin/python" examples/qwen_image/build_tiny.py "$models"

export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
variables=$("$ROLLOUT_VENV/bin/python" -c 'from megatron_omni.rollout.vllm_omni.cpu import ENVIRONMENT
print(*(f"{name}={value}" for name, value in ENVIRONMENT.items()))')
export $variables # what vLLM wants on a CPU
judge_log=$models/judge.log
start_judge "$models/judge" judge --dtype float32 --enforce-eager --max-num-seqs 8

run "$VENV/bin/torchrun" --standalone --nproc-per-node 2 pretrain_rl.py \
    --config examples/qwen_image/flowgrpo_judge_tiny.yaml \
    --rollout-python "$ROLLOUT_VENV/bin/python" --judge-urls "$judge_url" "$@"
