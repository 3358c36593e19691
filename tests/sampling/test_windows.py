"""Windows lie where they should, for every setting."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from megatron_omni.sampling.windows import draw_trained, draw_window


@given(steps=st.integers(2, 50), seed=st.integers(0, 1000))
def test_without_a_size_all_steps_but_the_last_are_stochastic(steps, seed):
    assert draw_window(steps, 0, None, Random(seed)) == tuple(range(steps - 1))


@given(data=st.data(), steps=st.integers(3, 50), seed=st.integers(0, 1000))
def test_a_window_is_contiguous_and_inside_its_range(data, steps, seed):
    low = data.draw(st.integers(0, steps - 2))
    high = data.draw(st.integers(low + 1, steps - 1))
    size = data.draw(st.integers(1, high - low))
    window = draw_window(steps, size, (low, high), Random(seed))
    assert window == tuple(range(window[0], window[0] + size))
    assert low <= window[0] and window[-1] < high


def test_every_start_is_drawn():
    random = Random(0)
    assert {draw_window(10, 3, (1, 6), random)[0] for _ in range(200)} == {1, 2, 3}


@given(size=st.integers(1, 40), fraction=st.floats(0.01, 1), seed=st.integers(0, 1000))
def test_trained_steps_are_a_share_of_the_window(size, fraction, seed):
    window = tuple(range(2, 2 + size))
    trained = draw_trained(window, fraction, Random(seed))
    assert set(trained) <= set(window)
    assert list(trained) == sorted(trained)
    assert len(trained) == max(1, round(fraction * size))
