#!/usr/bin/env bash
# Sets up the trainer's and the rollout engines' virtual environments and runs the whole test suite.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/venv.sh
VENV=${VENV:-.venv}
make_venv "$VENV" requirements.txt requirements-dev.txt
export ROLLOUT_VENV=${ROLLOUT_VENV:-.venv-rollout}
make_rollout_venv "$ROLLOUT_VENV"
export OMP_NUM_THREADS=1
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
exec "$VENV/bin/python" -m pytest --numprocesses="${TEST_PROCESSES:-2}" --dist=loadgroup "$@"
