"""One thread a process, examples that may take their time, and no GPU test without a GPU."""

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"  # before torch is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

import megatron_omni.platforms.ready  # noqa: E402, F401  # before any test imports Megatron
from megatron_omni.platforms import current_platform  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


def pytest_collection_modifyitems(items):
    if current_platform().name == "cpu":
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
