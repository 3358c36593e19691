#!/usr/bin/env bash
# Flow-GRPO on Qwen-Image with a vision-language judge, on one node of H200:
#
#   MODEL=/data/Qwen-Image PROMPTS=/data/train.txt bash examples/qwen_image/flowgrpo_judge.sh TUNING JUDGE [flags]
#
# TUNING  full       all weights, tensor parallel 4, no guidance
#         lora       LoRA of rank 64, tensor parallel 2 × data parallel 2, guidance 4
# JUDGE   colocated  on the same 4 GPUs, a tenth of each
#         separate   on a fifth GPU
#
# The GPUs are the first of CUDA_VISIBLE_DEVICES, or 0 to 4. A replica's rollout engine has those that the replica
# trains on, and sleeps while it does. ROLLOUT_VENV is the rollout environment (docs/rollout.md), JUDGE_MODEL the
# judge's folder if it is not to be downloaded.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/qwen_image/judge.sh
ROLLOUT_VENV=${ROLLOUT_VENV:-.venv-rollout}
: "${MODEL:?set MODEL to the diffusers folder of Qwen-Image}"
: "${PROMPTS:?set PROMPTS to a file of prompts, with the text to draw in quotes}"

tuning=${1-} placement=${2-}
name=qwen_image-flowgrpo_judge-$tuning
case $tuning in
    full) flags=() ;;
    lora)
        flags=(
            --tensor-model-parallel-size 2 --rollout-tensor-parallel-size 2 --no-optimizer-cpu-offload
            --lora-rank 64 --lora-alpha 128 --lora-transfer adapter --lr 3e-4 --clip-range 1e-4 --true-cfg-scale 4
            --lora-target-modules to_q to_k to_v to_out.0 add_q_proj add_k_proj add_v_proj to_add_out
            img_mlp.net.0.proj img_mlp.net.2 txt_mlp.net.0.proj txt_mlp.net.2
        )
        ;;
    *) echo "TUNING is full or lora, not '$tuning'." >&2; exit 2 ;;
esac
case $placement in
    colocated) needed=4 first=0 judge=(--tensor-parallel-size 4 --gpu-memory-utilization 0.1 --enforce-eager) ;;
    separate) needed=5 first=4 judge=(--gpu-memory-utilization 0.9) ;;
    *) echo "JUDGE is colocated or separate, not '$placement'." >&2; exit 2 ;;
esac
shift 2
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0,1,2,3,4}"
if ((${#gpus[@]} < needed)); then
    echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names ${#gpus[@]} GPUs, and '$placement' wants $needed." >&2
    exit 2
fi
training_gpus=$(IFS=,; echo "${gpus[*]:0:4}")
judge_gpus=$(IFS=,; echo "${gpus[*]:first:needed-first}")

mkdir -p runs
judge_log=runs/$name.judge.log
judge_model=Qwen/Qwen3-VL-8B-Instruct
CUDA_VISIBLE_DEVICES=$judge_gpus start_judge "${JUDGE_MODEL:-$judge_model}" "$judge_model" "${judge[@]}"
CUDA_VISIBLE_DEVICES=$training_gpus run torchrun --standalone --nproc-per-node 4 pretrain_rl.py \
    --config examples/qwen_image/flowgrpo_judge.yaml --run-name "$name" \
    --model-path "$MODEL" --train-data "$PROMPTS" --rollout-python "$ROLLOUT_VENV/bin/python" \
    --judge-model "$judge_model" --judge-urls "$judge_url" "${flags[@]}" "$@"
