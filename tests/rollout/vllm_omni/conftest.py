"""One engine a module and a number of workers: starting it takes longer than all that it is asked."""

import pytest

from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.rollout.vllm_omni.engine_process import EngineProcess


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return tiny_pipeline_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", params=[1, 2], ids=["one worker", "two workers"])
def engine(request, model_folder, tmp_path_factory):
    """Leave it awake and with the weights of `model_folder`, so that the next test may begin there."""
    folder = tmp_path_factory.mktemp("engine")
    engine = EngineProcess(model_folder, folder, request.param)
    yield engine
    engine.stop()
