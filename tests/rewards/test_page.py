"""What docs/rewards.md shows works as it stands there."""

import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError
from megatron_omni.rewards.pool import RewardPool
from megatron_omni.rewards.registry import REWARDS
from megatron_omni.rewards.server import ServerConfig
from tests.rewards.judge_server import JudgeServer, Reply, options, question

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
MODULES = re.findall(r"^```python\n# (\w+)\.py(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
IMAGES = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The page's modules, importable."""
    for name, code in MODULES:
        (tmp_path / f"{name}.py").write_text(f"# {code}")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_named_reward_is_on_the_page():
    assert set(REWARDS.paths) == set(re.findall(r"^\| `(\w+)` \| .* \| .* \|$", PAGE, re.MULTILINE))


def test_every_setting_on_the_page_exists():
    known = {setting.name for group in fields(Config) for setting in fields(group.type)}
    known |= {setting.name for setting in fields(ServerConfig)} | {"config"}
    text = re.sub(r"\.venv-rollout/bin/vllm serve.*\n.*", "", PAGE).replace("--served-model-name", "")
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z][a-z-]*)", text)}
    assert len(named) > 12 and named <= known, named - known


def test_the_function(folder):
    images = IMAGES.clone()
    images[1, 0] = 255
    with RewardPool("my_rewards:redness", 1, 10.0) as pool:
        assert pool.submit(images, [{"prompt": ""}] * 2).result().values.tolist() == [0, 1]


def test_the_class(folder):
    np.save(folder / "black.npy", np.zeros((8, 8, 3), np.uint8))
    np.save(folder / "white.npy", np.full((8, 8, 3), 255, np.uint8))
    rows = [{"prompt": "", "reference": str(folder / f"{name}.npy")} for name in ("black", "white")]
    with RewardPool("my_likeness:Likeness", 1, 10.0) as pool:
        assert pool.submit(IMAGES, rows).result().values.tolist() == [1, 0]
        with pytest.raises(UserError, match="'a cat' has no \"reference\""):
            pool.check_prompts([*rows, {"prompt": "a cat"}])


def test_the_judge(folder):
    (template,) = re.findall(r"with counting.jinja beside it:\n#\s*(.*)\n", PAGE)
    (folder / "counting.jinja").write_text(template)
    rows = [{"prompt": f"{n} cats", "object": "cats", "count": n} for n in (3, 2)]
    with (
        JudgeServer(lambda _: Reply('{"count": 3}')) as server,
        RewardPool("my_judges:Counting", 1, 10.0, options(server.url)) as pool,
    ):
        pool.check_prompts(rows)
        assert pool.submit(IMAGES, rows).result().values.tolist() == [1, 0]
    assert question(server.requests[0]).startswith("How many cats are in this picture?")
