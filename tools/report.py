"""Make a run's report: python tools/report.py runs/quickstart"""

import sys
from pathlib import Path

import tyro

from megatron_omni.errors import UserError
from megatron_omni.training.report import write_report


def main(run_folder: tyro.conf.Positional[Path]) -> None:
    """Write report.html into a run's folder; the run may be finished, going on, or killed.

    Args:
        run_folder: The folder with config.yaml, metrics.jsonl and samples/.
    """
    try:
        print(write_report(run_folder))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    tyro.cli(main)
