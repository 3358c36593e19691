"""The choice of hardware, and that only its room knows it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_omni
from megatron_omni.errors import UserError
from megatron_omni.platforms import current_platform

choose = current_platform.__wrapped__  # without the cache
PACKAGE = Path(megatron_omni.__file__).parent


@pytest.mark.parametrize(("name", "backend"), [("cuda", "nccl"), ("npu", "hccl"), ("cpu", "gloo")])
def test_the_environment_overrides_the_choice(monkeypatch, name: str, backend: str):
    monkeypatch.setenv("MEGATRON_OMNI_PLATFORM", name)
    assert (choose().name, choose().backend) == (name, backend)


def test_an_unknown_platform_is_named_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("MEGATRON_OMNI_PLATFORM", "tpu")
    with pytest.raises(UserError, match=r"'tpu'.*cuda, npu, cpu"):
        choose()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_an_accelerator_the_cpu_is_chosen(monkeypatch):
    monkeypatch.delenv("MEGATRON_OMNI_PLATFORM", raising=False)
    assert choose().name == "cpu"
    assert choose().device(3) == torch.device("cpu")


@pytest.mark.gpu
def test_a_gpu_is_chosen_and_its_peak_memory_measured_anew_after_a_reset(monkeypatch):
    monkeypatch.delenv("MEGATRON_OMNI_PLATFORM", raising=False)
    platform = choose()
    device = platform.device(0)
    assert (platform.name, device) == ("cuda", torch.device("cuda", 0))
    large = torch.zeros(2**28, device=device)
    platform.synchronize()
    assert platform.peak_memory_gib() >= 1
    del large
    platform.reset_peak_memory()
    assert platform.peak_memory_gib() < 1


def test_peak_memory_of_the_cpu_is_resident_memory_in_gib():
    platform = current_platform()
    before = platform.peak_memory_gib()
    ones = torch.ones(2**26)  # a quarter of a GiB
    assert 0 < before < platform.peak_memory_gib()
    assert ones.nbytes / 2**30 <= platform.peak_memory_gib() < 64


def test_torch_cuda_is_named_only_in_the_hardware_room():
    files = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "platforms" not in path.parents]
    assert len(files) > 20
    assert [str(path) for path in files if "torch.cuda" in path.read_text()] == []


STAND_INS = {
    "torch_npu/__init__.py": "print('torch_npu')",
    "mindspeed/__init__.py": "",
    "mindspeed/megatron_adaptor.py": "print('adaptor'); import megatron.core",
    "megatron/core/__init__.py": "print('megatron')",
}


def test_on_an_npu_mindspeed_comes_before_megatron(tmp_path: Path):
    for name, text in STAND_INS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(PACKAGE.parent)!r}]
import megatron_omni.parallel
import megatron.core
from megatron_omni.platforms import current_platform
print(current_platform().name)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["torch_npu", "adaptor", "megatron", "npu"]
