"""A real vLLM-Omni engine behind its HTTP interface, against the in-place engine on the same folder."""

import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_omni.rollout.vllm_omni.protocol import SampleRequest
from megatron_omni.rollout.vllm_omni.transport import checksum
from tests.distributed import run_distributed
from tests.rollout.vllm_omni.engine_process import EngineProcess, ended, launch
from tests.rollout.vllm_omni.in_place import in_place_samples

pytestmark = pytest.mark.xdist_group("engine")  # or every test process starts engines of its own

BASE = SampleRequest(
    prompt="a cat",
    negative_prompt=" ",
    seed=11,
    noise_seed=12,
    height=64,
    width=64,
    num_inference_steps=5,
    sde_type="sde",
    noise_level=0.7,
    true_cfg_scale=1.0,
    window=(0, 1, 2, 3),
    trained=(0, 1, 2, 3),
)
REQUESTS = [
    BASE,
    replace(BASE, prompt="a longer prompt, which pads the others", seed=13),  # the same initial noise
    replace(BASE, window=(1, 2), trained=(2,), noise_seed=14, record_means=True),
    replace(BASE, window=(), trained=(), sde_type="ode"),
    replace(BASE, true_cfg_scale=4.0, window=(0, 1), trained=(0, 1), record_means=True),
    replace(
        BASE, true_cfg_scale=4.0, prompt="", negative_prompt="blurred", sde_type="dance", noise_level=0.3
    ),
    replace(BASE, height=32, width=96, sde_type="cps", num_inference_steps=7, window=(2, 4), trained=(2, 4)),
    replace(BASE, height=32, width=96, true_cfg_scale=2.0, seed=15),
]
RANK, ALPHA = 4, 6.0
LAYERS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.add_q_proj", "attn.to_add_out")
LAYERS += ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.2", "img_mod.1")


def trained(folder: Path) -> dict[str, Tensor]:
    """Other weights of the same model, in which every tensor differs."""
    noise = torch.Generator().manual_seed(1)
    return {name: w + 0.1 * torch.randn(w.shape, generator=noise) for name, w in weights(folder).items()}


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "transformer/diffusion_pytorch_model.safetensors")


def adapter(folder: Path, seed: int) -> dict[str, Tensor]:
    """Under PEFT's names, on layers of every kind."""
    base, noise, tensors = weights(folder), torch.Generator().manual_seed(seed), {}
    for layer in (f"transformer_blocks.{block}.{name}" for block in range(2) for name in LAYERS):
        out_features, in_features = base[f"{layer}.weight"].shape
        for factor, shape in (("A", (RANK, in_features)), ("B", (out_features, RANK))):
            tensors[f"{layer}.lora_{factor}.weight"] = 0.3 * torch.randn(shape, generator=noise)
    return tensors


def merged(folder: Path, seed: int) -> dict[str, Tensor]:
    tensors, factors = weights(folder), adapter(folder, seed)
    for name in [name for name in factors if ".lora_A." in name]:
        layer = name.partition(".lora_")[0]
        delta = factors[f"{layer}.lora_B.weight"] @ factors[name]
        tensors[f"{layer}.weight"] += ALPHA / RANK * delta
    return tensors


@pytest.fixture(scope="module")
def expected(model_folder, tmp_path_factory):
    """The in-place engine's samples of each state of the weights."""
    states = {"base": weights(model_folder), "trained": trained(model_folder)}
    states |= {f"adapter {seed}": merged(model_folder, seed) for seed in (1, 2)}
    folders = {}
    for name, tensors in states.items():
        folders[name] = shutil.copytree(model_folder, tmp_path_factory.mktemp("state") / "model")
        save_file(tensors, folders[name] / "transformer/diffusion_pytorch_model.safetensors")
    (samples,) = run_distributed(in_place_samples, 1, list(folders.values()), REQUESTS)
    return dict(zip(folders, samples, strict=True))


def assert_same(samples, wanted, version: str | None) -> None:
    for sample, reference in zip(samples, wanted, strict=True):
        assert sample.pop("weight_version") == version
        image, reference = sample.pop("image"), dict(reference)
        # Where a value lies between two levels, either is right.
        assert np.abs(image.astype(int) - reference.pop("image").numpy().astype(int)).max() <= 1
        assert sample.keys() == reference.keys()
        for name, tensor in reference.items():
            torch.testing.assert_close(
                torch.from_numpy(sample[name]),
                tensor,
                atol=1e-5,
                rtol=1e-5,
                msg=lambda m, name=name: f"{name}: {m}",
            )


def test_samples_are_those_of_the_in_place_engine(engine, expected):
    assert_same(engine.generate(*REQUESTS), expected["base"], None)


def test_a_sample_does_not_depend_on_its_company(engine, expected):
    for request, reference in zip(REQUESTS[1::3], expected["base"][1::3], strict=True):
        assert_same(engine.generate(request), [reference], None)


@pytest.mark.parametrize("transport", ["shared_memory", "process_group", "folder"])
def test_samples_after_an_update_are_those_of_the_new_weights(engine, model_folder, expected, transport):
    sent, report = engine.update(trained(model_folder).items(), version="3", transport=transport)
    assert sent.buckets > 1
    assert report == {"version": "3", "checksum": sent.checksum, "missing": [], "unknown": []}
    assert engine.get("/health")["weight_version"] == "3"
    assert_same(engine.generate(*REQUESTS), expected["trained"], "3")

    engine.update(weights(model_folder).items(), version="4", transport=transport)
    assert_same(engine.generate(BASE), expected["base"][:1], "4")


def test_the_checksum_shows_a_tensor_that_did_not_come(engine, model_folder):
    tensors = trained(model_folder)
    stale = tensors.pop("transformer_blocks.1.attn.to_k.weight")
    sent, report = engine.update(tensors.items(), version="5")
    assert report["missing"] == ["transformer_blocks.1.attn.to_k.weight"]
    assert report["checksum"] != (sent.checksum + checksum(stale)) % 2**64
    engine.update(weights(model_folder).items(), version="6")


def test_names_that_the_model_does_not_have_are_reported(engine, model_folder):
    tensors = weights(model_folder)
    tensors["transformer_blocks.0.attn.to_p.weight"] = tensors.pop("transformer_blocks.0.attn.to_q.weight")
    tensors["proj_out.scale"] = torch.ones(1)
    _, report = engine.update(tensors.items(), version="7")
    assert report["missing"] == ["transformer_blocks.0.attn.to_q.weight"]
    assert report["unknown"] == ["proj_out.scale", "transformer_blocks.0.attn.to_p.weight"]
    engine.update(weights(model_folder).items(), version="8")


def test_asleep_it_refuses_and_awake_nothing_has_changed(engine, model_folder, expected):
    before = engine.generate(BASE)[0]
    engine.post("/sleep")
    assert engine.get("/health")["asleep"]
    assert engine.refusal("/generate", asdict(BASE)) == (400, "the engine is asleep: wake it first.")
    engine.post("/wake")
    assert not engine.get("/health")["asleep"]
    after = engine.generate(BASE)[0]
    assert all(np.array_equal(before[name], after[name]) for name in before)

    engine.post("/sleep")
    engine.post("/wake")
    sent, report = engine.update(trained(model_folder).items(), version="9")
    assert report["checksum"] == sent.checksum
    assert_same(engine.generate(BASE), expected["trained"][:1], "9")
    engine.update(weights(model_folder).items(), version="10")


def test_an_adapter_samples_like_merged_weights_and_the_next_replaces_it(engine, model_folder, expected):
    for version, seed in (("11", 1), ("12", 2)):
        sent, report = engine.update(
            adapter(model_folder, seed).items(), version, {"rank": RANK, "alpha": ALPHA}
        )
        assert report == {"version": version, "checksum": sent.checksum, "missing": [], "unknown": []}
        assert_same(engine.generate(*REQUESTS), expected[f"adapter {seed}"], version)

    sent, report = engine.update(weights(model_folder).items(), version="13")
    assert report == {"version": "13", "checksum": sent.checksum, "missing": [], "unknown": []}
    assert_same(engine.generate(BASE), expected["base"][:1], "13")


def test_an_update_after_an_adapter_reaches_the_adapted_layers(engine, model_folder, expected):
    engine.update(adapter(model_folder, 1).items(), "14", {"rank": RANK, "alpha": ALPHA})
    sent, report = engine.update(trained(model_folder).items(), "15")
    assert report == {"version": "15", "checksum": sent.checksum, "missing": [], "unknown": []}
    assert_same(engine.generate(*REQUESTS), expected["trained"], "15")
    engine.update(weights(model_folder).items(), version="16")


def test_layers_of_an_adapter_that_the_model_does_not_have_are_reported(engine, model_folder):
    tensors = adapter(model_folder, 1)
    tensors["transformer_blocks.7.attn.to_q.lora_A.weight"] = torch.ones(RANK, 1)
    _, report = engine.update(tensors.items(), "17", {"rank": RANK, "alpha": ALPHA})
    assert report["unknown"] == ["transformer_blocks.7.attn.to_q.lora_A.weight"]
    engine.update(weights(model_folder).items(), version="18")


def test_after_an_update_that_failed_it_samples_only_when_another_has_succeeded(engine, model_folder):
    engine.post(
        "/weights/begin", {"version": "19", "transport": folder_transport(engine.folder), "kind": "model"}
    )
    assert engine.refusal("/sleep") == (400, "the weights are being updated: end that first.")
    bucket = {"slot": 0, "nbytes": 0, "tensors": [], "location": {"file": "none.safetensors"}}
    status, message = engine.refusal("/weights/bucket", bucket)
    assert status == 500 and "none.safetensors" in message
    status, message = engine.refusal("/generate", asdict(BASE))
    assert status == 500 and "send them again" in message
    engine.update(weights(model_folder).items(), version="20")
    engine.generate(BASE)


def folder_transport(folder: Path) -> dict[str, str]:
    return {"kind": "folder", "folder": str(folder)}


def test_an_update_waits_for_samples_in_flight_and_they_for_it(engine, model_folder, expected):
    engine.update(weights(model_folder).items(), version="21")
    slow = replace(BASE, num_inference_steps=60)
    with ThreadPoolExecutor(2) as threads:
        before = threads.submit(engine.generate, slow)
        while not engine.get("/health"):  # answers while it samples
            time.sleep(0.01)
        time.sleep(0.3)
        update = threads.submit(engine.update, trained(model_folder).items(), "22")
        time.sleep(0.05)
        after = engine.generate(BASE)
        assert before.result()[0]["weight_version"] == "21"
        update.result()
    assert_same(after, expected["trained"][:1], "22")
    engine.update(weights(model_folder).items(), version="23")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"sde_type": "sdes"}, "sde_type"),
        ({"true_cfg_scale": 0.5}, "true_cfg_scale 0.5"),
        ({"window": (4,)}, "between 0 and 3"),
        ({"window": (1,), "trained": (2,)}, "not all in the window"),
        ({"height": 40}, "multiples of 16"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused(engine, change, words):
    status, message = engine.refusal("/generate", asdict(BASE) | change)
    assert status == 400 and words in message, message


def test_calls_out_of_order_are_refused(engine):
    assert engine.refusal("/wake") == (400, "the engine is awake.")
    assert engine.refusal("/weights/end") == (400, "no update of the weights has begun.")
    assert engine.refusal("/weights/begin", {"version": "1", "transport": {}, "kind": "adapter"})[0] == 400


def test_told_to_end_or_killed_it_leaves_no_process(engine):
    """The last test of an engine. With one worker that is the engine's process itself."""
    family = engine.family()
    if engine.workers > 1:
        engine.process.kill()
        assert engine.process.wait(60) < 0
    else:
        engine.process.terminate()
        assert engine.process.wait(60) == 0
    assert ended(family)


def test_when_a_worker_is_killed_whatever_is_asked_fails_in_time_and_nothing_is_left(model_folder, tmp_path):
    engine = EngineProcess(model_folder, tmp_path, workers=2)
    family = engine.family()
    (victim,) = (process for process in family if process.name().endswith("Worker_TP1"))
    dead = (500, "a worker of this engine has died: start another engine.")
    with ThreadPoolExecutor(2) as threads:
        endless = asdict(replace(BASE, num_inference_steps=5000))
        under_way = [threads.submit(engine.refusal, "/generate", endless) for _ in range(2)]
        time.sleep(1)
        assert not any(answer.done() for answer in under_way)
        victim.kill()
        assert [answer.result()[0] for answer in under_way] == [500, 500]
    answer = requests.get(engine.url + "/health", timeout=60)
    assert (answer.status_code, answer.json()["error"]) == dead
    assert engine.refusal("/generate", asdict(BASE))[0] == 500
    update = {"version": "1", "transport": folder_transport(tmp_path), "kind": "model"}
    assert engine.refusal("/weights/begin", update)[0] == 500
    engine.process.terminate()
    assert engine.process.wait(60) == 0
    assert ended(family)


def test_it_ends_with_its_parent_even_while_it_starts(model_folder, tmp_path):
    parent = subprocess.Popen(["sleep", "100"])
    process = launch(model_folder, tmp_path, "--parent", str(parent.pid))
    time.sleep(4)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    parent.kill()
    parent.wait()
    process.wait(60)
    assert ended(family)


@pytest.mark.parametrize(
    "model, workers, words", [("none", "1", "model_index.json"), ("tiny", "3", "divide the model's 2 ")]
)
def test_it_says_in_one_line_why_it_cannot_start(model_folder, tmp_path, model, workers, words):
    process = launch(model_folder.parent / model, tmp_path, "--tensor-parallel-size", workers)
    assert process.wait(60) == 2
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert words in line
