"""Every example's settings are valid, and its scripts are sound."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_omni.config.parse import load_config
from megatron_omni.config.validate import validate

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *ROOT.glob("examples/**/*.sh"),
    *ROOT.glob("examples/**/*.slurm"),
    *ROOT.glob("t*/*.sh"),
    ROOT / ".ci/run",
]


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        ("quickstart/flow_grpo_ocr.yaml", [1, 2, 4]),
        ("quickstart/flow_matching.yaml", [1]),
        ("qwen_image/flow_grpo_ocr.yaml", [8, 32]),
        ("qwen_image/flowgrpo_judge.yaml", [4]),
        ("qwen_image/flowgrpo_judge_tiny.yaml", [2, 4]),
    ],
)
def test_settings_are_valid(name, processes, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    config = load_config(ROOT / "examples" / name)
    # What the user brings, or an earlier step makes.
    (tmp_path / "data.jsonl").touch()
    if not (config.model.model_path and Path(config.model.model_path).is_dir()):
        config.model.model_path = str(tmp_path)
    if not Path(config.data.train_data).is_file():
        config.data.train_data = str(tmp_path / "data.jsonl")
    for count in processes:
        validate(config, count)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_parse_and_name_files_that_exist(path):
    subprocess.run(["bash", "-n", path], check=True)
    for name in re.findall(r"(?:examples|tools|tests)/[\w./-]+\.(?:yaml|sh|py)", path.read_text()):
        assert (ROOT / name).exists(), name
