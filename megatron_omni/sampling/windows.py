"""Which denoising steps are stochastic, and which of them are trained."""

from random import Random


def draw_window(
    steps: int, window_size: int, window_range: tuple[int, int] | None, random: Random
) -> tuple[int, ...]:
    """Indices of the stochastic steps of one group.

    All steps but the last when `window_size` is 0 (Flow-GRPO); otherwise that many in a row, whose start
    is drawn so that the window lies inside `window_range` (Flow-GRPO-Fast). The last step, where sigma
    reaches 0, is never stochastic.
    """
    low, high = window_range or (0, steps - 1)
    if window_size == 0:
        return tuple(range(low, high))
    start = random.randint(low, high - window_size)
    return tuple(range(start, start + window_size))


def draw_trained(window: tuple[int, ...], fraction: float, random: Random) -> tuple[int, ...]:
    """The share of a window's steps that is trained: at least one, in order (DanceGRPO, section 3.3)."""
    count = max(1, round(fraction * len(window)))
    return tuple(sorted(random.sample(window, count)))
