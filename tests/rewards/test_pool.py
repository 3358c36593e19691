import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megatron_omni.errors import UserError
from megatron_omni.rewards.pool import RewardPool

REWARD = "tests.rewards.example_rewards:first_pixel"


@pytest.fixture(scope="module")
def pool():
    with RewardPool(REWARD, workers=2, timeout=10) as pool:
        yield pool


def images(count: int, height: int = 6, width: int = 8) -> torch.Tensor:
    """Image i has the red value i."""
    pixels = torch.zeros(count, 3, height, width, dtype=torch.uint8)
    pixels[:, 0] = torch.arange(count)[:, None, None]
    return pixels


def rows(count: int, **mishaps: str) -> list[dict]:
    """Rows of which row i meets the mishap given as `_i`."""
    rows = [{"prompt": f"prompt {i}"} for i in range(count)]
    for index, mishap in mishaps.items():
        rows[int(index[1:])]["do"] = mishap
    return rows


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(pool: RewardPool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


def settle(pool: RewardPool) -> int:
    """Replace every process that was lost; returns how many have been so far."""
    for _ in range(2):
        assert pool.submit(images(4), rows(4)).result().valid.all()
    return pool.restarts


def wait_until(condition, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_results_are_in_the_order_of_the_images(pool, count):
    result = pool.submit(images(count), rows(count)).result()
    assert result.values.tolist() == list(range(count))
    assert result.values.dtype == torch.float32
    assert result.valid.dtype == torch.bool and result.valid.all()
    assert result.error == ""


def test_many_batches_in_flight_keep_their_results_apart(pool):
    pending = [pool.submit(images(n), rows(n)) for n in range(1, 20)]
    assert [p.result().values.tolist() for p in pending] == [list(range(n)) for n in range(1, 20)]


def test_a_batch_larger_than_the_pipe_passes(pool):
    big = images(4, 512, 512)
    assert pool.submit(big, rows(4)).result().values.tolist() == [0, 1, 2, 3]


def test_a_tensor_that_is_not_contiguous_is_scored_as_it_looks(pool):
    flipped = images(4).flip(0).permute(0, 1, 3, 2)
    assert pool.submit(flipped, rows(4)).result().values.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("mishap", ["nan", "infinity", "raise"])
def test_a_failing_sample_is_masked_and_the_others_are_not(pool, mishap):
    result = pool.submit(images(6), rows(6, _1=mishap, _5=mishap)).result()
    assert result.valid.tolist() == [True, False, True, True, True, False]
    assert result.values.tolist() == [0, 0, 2, 3, 4, 0]
    assert {"nan": "nan", "infinity": "inf", "raise": "bad sample"}[mishap] in result.error


def test_if_all_samples_fail_the_error_says_why(pool):
    result = pool.submit(images(2), rows(2, _0="raise", _1="raise")).result()
    assert not result.valid.any()
    assert "ValueError: bad sample" in result.error and "example_rewards.py" in result.error


@pytest.mark.parametrize("mishap", ["die", "exit"])
def test_a_process_that_dies_is_replaced_and_its_samples_are_masked(pool, mishap):
    restarts = settle(pool)
    result = pool.submit(images(4), rows(4, _3=mishap)).result()
    assert result.valid.tolist() == [True, True, False, False]
    assert "died" in result.error
    assert settle(pool) > restarts


def test_samples_of_a_process_killed_while_scoring_are_scored_again(pool, tmp_path):
    restarts = settle(pool)
    metadata = rows(4, _0="die once")
    metadata[0]["mark"] = str(tmp_path / "died")
    result = pool.submit(images(4), metadata).result()
    assert result.values.tolist() == [1, 1, 2, 3]
    assert result.valid.all()
    assert settle(pool) == restarts + 1


def test_a_process_killed_while_idle_is_replaced_without_loss(pool):
    restarts = settle(pool)
    os.kill(pids(pool)[0], signal.SIGKILL)
    assert settle(pool) == restarts + 1


@pytest.mark.parametrize("mishap", ["hang", "hang in a child"])
def test_a_timeout_masks_the_share_within_a_bounded_time(mishap, tmp_path):
    metadata = rows(4, _0=mishap)
    metadata[0]["mark"] = str(tmp_path / "child")
    with RewardPool(REWARD, workers=2, timeout=1) as pool:
        start = time.monotonic()
        result = pool.submit(images(4), metadata).result()
        assert time.monotonic() - start < 5
        assert result.valid.tolist() == [False, False, True, True]
        assert "within 1 s" in result.error
        if mishap == "hang in a child":
            assert wait_until(lambda: not alive(int((tmp_path / "child").read_text())))
        assert pool.submit(images(4), rows(4)).result().valid.all()


def test_a_process_that_dies_leaving_a_fork_masks_its_share_within_a_bounded_time(tmp_path):
    """The fork holds the pipe."""
    metadata = rows(1, _0="die with a fork")
    metadata[0]["mark"] = str(tmp_path / "child")
    with RewardPool(REWARD, workers=1, timeout=1) as pool:
        pending = pool.submit(images(1), metadata)
        assert wait_until(pending.done)
        assert not pending.result().valid.any()
        assert wait_until(lambda: not alive(int((tmp_path / "child").read_text())))
        assert pool.submit(images(4), rows(4)).result().valid.all()


def test_a_process_that_dies_while_a_batch_is_sent_to_it_is_replaced(monkeypatch):
    def slowly(connection: Connection, data: memoryview) -> None:
        while data:
            data = data[os.write(connection._handle, data[:8192]) :]
            time.sleep(0.01)

    with RewardPool(REWARD, workers=1, timeout=10) as pool:
        monkeypatch.setattr(Connection, "_send", slowly)
        pending = pool.submit(images(4, 512, 512), rows(4))
        time.sleep(0.1)
        os.kill(pids(pool)[0], signal.SIGKILL)
        assert pending.result().valid.all()
        assert pool.restarts == 1


def test_a_stopped_process_does_not_block_a_big_batch():
    with RewardPool(REWARD, workers=1, timeout=1) as pool:
        os.kill(pids(pool)[0], signal.SIGSTOP)
        assert not pool.submit(images(4, 512, 512), rows(4)).result().valid.any()


def test_scoring_overlaps_with_the_caller_and_between_processes(pool):
    settle(pool)
    metadata = [{"prompt": "", "do": "sleep", "seconds": 2.0}] * 2
    start = time.monotonic()
    pending = pool.submit(images(2), metadata)
    assert time.monotonic() - start < 1 and not pending.done()
    time.sleep(2.0)  # the caller's own work
    scorers = pending.result().values.tolist()
    assert pending.done()
    assert time.monotonic() - start < 3.5  # 4 s if the caller or the other process had to wait, 6 s if both
    assert sorted(scorers) == sorted(pids(pool))


def test_it_works_beside_torch_threads_and_a_gloo_group(pool, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        stop = threading.Event()

        def work():
            while not stop.is_set():
                torch.randn(64, 64) @ torch.randn(64, 64)

        thread = threading.Thread(target=work)
        thread.start()
        with RewardPool(REWARD, workers=1, timeout=10) as other:
            assert other.submit(images(4), rows(4)).result().valid.all()
        stop.set()
        thread.join()
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def test_scoring_processes_use_one_thread():
    with RewardPool("tests.rewards.example_rewards:threads", workers=1, timeout=10) as pool:
        assert pool.submit(images(1), rows(1)).result().values.tolist() == [1]


def test_a_wrong_number_of_values_is_a_failure_not_a_score():
    with RewardPool("tests.rewards.example_rewards:too_few", workers=1, timeout=10) as pool:
        result = pool.submit(images(1), rows(1)).result()
        assert result.values.tolist() == [1]
        # Alone each image gets its one value, so the batch of three is healed image by image.
        assert pool.submit(images(3), rows(3)).result().values.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("brigthness", "Did you mean 'brightness'"),
        ("tests.rewards.example_rewards:missing", "cannot be loaded"),
        ("no_such_module:f", "cannot be loaded"),
        ("tests.rewards.example_rewards:Broken", "RuntimeError: no such judge"),
        ("tests.rewards.example_rewards:NoScore", "without score"),
    ],
)
def test_a_reward_that_cannot_be_built_is_an_error_at_start(reward, message):
    with pytest.raises(UserError, match="cannot be built") as error:
        RewardPool(reward, workers=1, timeout=10)
    assert message in str(error.value)


def test_a_prompt_that_can_never_be_scored_is_named():
    with RewardPool("colour_match", workers=1, timeout=10) as pool:
        pool.check_prompts([{"prompt": "a red wall"}])
        with pytest.raises(UserError, match="a mauve wall"):
            pool.check_prompts([{"prompt": "a red wall"}, {"prompt": "a mauve wall"}])


def test_close_ends_hung_processes_at_once_and_leaves_no_zombie():
    pool = RewardPool(REWARD, workers=2, timeout=100)
    before = pids(pool)
    hung = pool.submit(images(4), rows(4, _0="hang", _2="hang"))
    queued = pool.submit(images(4), rows(4))
    time.sleep(0.3)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert not hung.result().valid.any() and not queued.result().valid.any()
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)


def test_processes_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time, torch
        sys.path[:] = {sys.path!r}
        from megatron_omni.rewards.pool import RewardPool
        pool = RewardPool({REWARD!r}, workers=2, timeout=1000)
        row = {{"prompt": "", "do": "hang in a child", "mark": {str(tmp_path / "child")!r}}}
        pool.submit(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), [row])
        print(*[worker.process.pid for worker in pool._workers], flush=True)
        time.sleep(1000)
        """)
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        children = [int(pid) for pid in parent.stdout.readline().split()]
        assert wait_until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
        children.append(int((tmp_path / "child").read_text()))
        assert len(children) == 3 and all(alive(pid) for pid in children)
        parent.kill()
        assert wait_until(lambda: not any(alive(pid) for pid in children))


def test_memory_and_file_descriptors_stay_flat(pool):
    def resident() -> int:
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in [*pids(pool), os.getpid()]]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    settle(pool)
    batch = images(16, 128, 128)  # 0.8 MB
    for _ in range(10):
        pool.submit(batch, rows(16, _3="raise")).result()
    memory, files = resident(), descriptors()
    for _ in range(100):
        pool.submit(batch, rows(16, _3="raise")).result()
    assert resident() - memory < 10e6  # the batches alone are 80 MB
    assert descriptors() == files
