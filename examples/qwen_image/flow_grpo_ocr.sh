#!/usr/bin/env bash
# One node of 8 devices:
#   MODEL=/data/Qwen-Image PROMPTS=/data/prompts.txt bash examples/qwen_image/flow_grpo_ocr.sh [flags]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec torchrun --standalone --nproc-per-node "${DEVICES:-8}" pretrain_rl.py \
    --config examples/qwen_image/flow_grpo_ocr.yaml \
    --model-path "${MODEL:?set MODEL to the diffusers folder of Qwen-Image}" \
    --train-data "${PROMPTS:?set PROMPTS to a file of prompts}" \
    "$@"
