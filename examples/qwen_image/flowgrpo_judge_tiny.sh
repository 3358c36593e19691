#!/usr/bin/env bash
# Flow-GRPO as in production, on two CPU cores in a few minutes: two tensor-parallel training processes, vLLM-Omni
# as the rollout engine, and a vision-language judge in vLLM. Both models are random and tiny. Sets up both
# environments where they are missing (VENV and ROLLOUT_VENV tell others), and leaves
# runs/flowgrpo_judge_tiny/metrics.jsonl. Arguments go to pretrain_rl.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/venv.sh
VENV=${VENV:-.venv}
ROLLOUT_VENV=${ROLLOUT_VENV:-.venv-rollout}
make_venv "$VENV" requirements.txt
make_rollout_venv "$ROLLOUT_VENV"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

models=build/flowgrpo_judge_tiny
log=$models/judge.log
"$VENV/bin/python" examples/qwen_image/build_tiny.py "$models"

started=() # what ends with this script, however that ends
finish() {
    kill "${started[@]}" 2>/dev/null || true
    wait
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

port=$("$VENV/bin/python" -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
judge=http://127.0.0.1:$port
variables=$("$ROLLOUT_VENV/bin/python" -c 'from megatron_omni.rollout.vllm_omni.cpu import ENVIRONMENT
print(*(f"{name}={value}" for name, value in ENVIRONMENT.items()))')
# The grammar without free white space, of which a random model would never have enough.
# shellcheck disable=SC2086
env $variables VLLM_NO_USAGE_STATS=1 "$ROLLOUT_VENV/bin/vllm" serve "$models/judge" --served-model-name judge \
    --host 127.0.0.1 --port "$port" --dtype float32 --enforce-eager --max-model-len 2048 --max-num-seqs 8 \
    --structured-outputs-config.backend xgrammar --structured-outputs-config.disable_any_whitespace true \
    >"$log" 2>&1 &
started+=($!)
echo "Starting the judge (log: $log) ..."
until "$VENV/bin/python" -c "import urllib.request; urllib.request.urlopen('$judge/health')" 2>/dev/null; do
    kill -0 "${started[0]}" 2>/dev/null || { echo "The judge has ended:" >&2; tail -n 20 "$log" >&2; exit 1; }
    sleep 1
done

# In the background, so that a signal to this script is heeded at once.
"$VENV/bin/torchrun" --standalone --nproc-per-node 2 pretrain_rl.py \
    --config examples/qwen_image/flowgrpo_judge_tiny.yaml --tensor-model-parallel-size 2 \
    --rollout-python "$ROLLOUT_VENV/bin/python" --judge-urls "$judge/v1" "$@" &
started+=($!)
wait $!
