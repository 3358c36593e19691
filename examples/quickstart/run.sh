#!/usr/bin/env bash
# From a fresh checkout to a trained model and a report: sets up .venv, trains, tells where the report is.
# Arguments go to pretrain_rl.py, e.g. `run.sh --seed 1`.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/venv.sh
make_venv .venv requirements.txt
processes=1
if ! has_accelerator && [ "$(nproc)" -ge 2 ]; then
    processes=2 # two data-parallel processes of one thread each use two cores best
fi
export OMP_NUM_THREADS=1
exec .venv/bin/torchrun --standalone --nproc-per-node "$processes" pretrain_rl.py \
    --config examples/quickstart/flow_grpo_ocr.yaml "$@"
