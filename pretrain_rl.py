"""Post-trains a diffusion model with reinforcement learning.

python pretrain_rl.py --config FILE [flags]
torchrun --nproc-per-node 2 pretrain_rl.py --config FILE --tensor-model-parallel-size 2
"""

import errno
import sys

from megatron_omni.config.parse import parse_config
from megatron_omni.errors import UserError


def train(run) -> None:
    """Prompts → samples → rewards → advantages → updates, iteration by iteration."""
    if run.iteration == 0:
        run.start()
    for iteration in run.iterations():
        requests = run.algorithm.requests(iteration, *run.next_prompts(iteration))
        with run.phase("rollout"):
            trajectory = run.draw(requests)
        for samples, advantages in run.scored(trajectory):
            with run.phase("update"):
                run.update(samples, advantages, iteration)
        with run.phase("weight_sync"):
            run.engine.update_weights(version=iteration + 1)
        run.finish_iteration(iteration + 1, trajectory)
    run.finish()


def main(arguments: list[str]) -> int:
    try:
        config = parse_config(arguments)
        # Slow to import, which --help need not wait for.
        from megatron_omni.training.run import open_run

        with open_run(config) as run:
            train(run)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(
            f"error: cannot write the run's files: {error}. What was saved before is intact.", file=sys.stderr
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
