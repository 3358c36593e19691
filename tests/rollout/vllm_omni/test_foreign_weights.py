"""An engine whose weights another trainer changes while it samples for this one."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_omni.config.schema import Config
from megatron_omni.rollout.vllm_omni.process import RunningEngine
from megatron_omni.rollout.vllm_omni.rollout import Link
from tests.distributed import run_distributed
from tests.rollout.vllm_omni.engine_process import EngineProcess
from tests.rollout.vllm_omni.test_rollout import Scene, config, groups
from tests.rollout.vllm_omni.test_server import ALPHA, RANK, adapter, trained

pytestmark = pytest.mark.xdist_group("vllm_omni")


def disturbed(settings: Config, model: Path) -> list[float]:
    """How often the engine was given up, for each update of the other trainer, to the same version."""
    scene = Scene(settings)
    engine, restarts = scene.engine, []
    (url,) = settings.vllm_omni.rollout_urls
    lora = replace(settings.lora, lora_rank=RANK, lora_alpha=ALPHA)
    other = Link(RunningEngine(url, timeout=60), replace(settings, lora=lora), scene.layout.device)
    assert other.ready()
    for iteration, (tensors, adapters) in enumerate([(trained(model), False), (adapter(model, 1), True)]):
        scene.perturb()
        engine.update_weights(scene.version)
        requests, drawn = groups(scene.parts, iteration, count=4), []
        for trajectory in engine.generate(requests):
            drawn.append(trajectory)
            if len(drawn) == 1:
                assert other.send(iter(tensors.items()), scene.version, torch.float32, adapters)
        scene.check(requests, drawn)
        assert engine.links[0].holds(scene.version) and not other.holds(scene.version)
        restarts.append(engine.metrics()["rollout/engine_restarts"])
    engine.close()
    return restarts


@pytest.mark.slow
def test_samples_of_weights_that_change_while_it_samples_are_drawn_again(model_folder, tmp_path):
    engine = EngineProcess(model_folder, tmp_path)
    # Two samples at a time and long ones, so that most are still to be drawn after the first micro-batch.
    settings = config(model_folder, tmp_path, rollout_urls=(engine.url,), rollout_max_num_seqs=1)
    settings.rollout.num_inference_steps = 12
    (restarts,) = run_distributed(disturbed, 1, settings, model_folder, timeout=300)
    assert restarts == [1, 1]
    engine.stop()
