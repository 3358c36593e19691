"""The house keeps its own rules."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_omni"

# Each room may import from those of its own line and below.
FLOORS = [
    {"training"},
    {"algorithms", "rollout", "rewards", "data"},
    {"models", "sampling", "checkpoint"},
    {"parallel", "platforms", "config"},
    {"errors", "registry", "cache", "wire", "ports"},
]
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    room = path.relative_to(PACKAGE).parts[0]
    tree = ast.parse(path.read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for name in names:
        parts = name.split(".")
        if parts[0] == "megatron_omni" and len(parts) > 1:
            assert LEVEL[parts[1]] >= LEVEL[room], f"{room} imports {name}"


def test_models_and_algorithms_know_nothing_of_each_other():
    for path in (PACKAGE / "algorithms").glob("*.py"):
        assert "megatron_omni.models" not in path.read_text(), path
    for path in (PACKAGE / "models").rglob("*.py"):
        assert "megatron_omni.algorithms" not in path.read_text(), path


def test_only_the_platforms_know_the_hardware():
    for path in [*modules(), ROOT / "pretrain_rl.py"]:
        if path.relative_to(PACKAGE if PACKAGE in path.parents else ROOT).parts[0] != "platforms":
            assert "torch.cuda" not in path.read_text(), path


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.name)
def test_pages_name_files_that_exist(page):
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)", text):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link
    for name in re.findall(r"(?<![\w/<.-])((?:examples|tools|tests|docs|megatron_omni)/[\w./-]*\w)", text):
        assert (ROOT / name).exists(), name


def test_rooms_that_use_megatron_make_the_platform_ready_first():
    uses = {
        path.relative_to(PACKAGE).parts[0]
        for path in modules()
        if re.search(r"^\s*(from|import) megatron[. ]", path.read_text(), re.MULTILINE)
    }
    for room in uses - {"platforms"}:
        assert "import megatron_omni.platforms.ready" in (PACKAGE / room / "__init__.py").read_text(), room


def test_scoring_processes_start_without_torch():
    code = "import sys, megatron_omni.rewards.ocr, megatron_omni.rewards.worker as _; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
