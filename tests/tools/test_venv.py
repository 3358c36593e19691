"""tools/venv.sh makes and completes environments, and harms no folder that it did not make."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BROKEN_OFF = """#!/bin/sh
[ "$1" != -m ] && exec {python} "$@"
touch "$3/pyvenv.cfg"
exit 1
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Programs that come first on the PATH: a GPU's, lest torch be downloaded."""
    folder = tmp_path / "tools"
    folder.mkdir()
    script(folder / "nvidia-smi", "#!/bin/sh\n")
    (tmp_path / "requirements.txt").touch()
    return folder


def script(path: Path, code: str) -> None:
    path.write_text(code)
    path.chmod(0o755)


def call(function: str, *arguments: Path, tools: Path, python: Path | str = sys.executable):
    """As the documentation says, in a shell that goes on after errors."""
    return subprocess.run(
        ["bash", "-c", f'source tools/venv.sh && {function} "$@"', "bash", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHON": str(python), "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


def make_venv(folder: Path, tools: Path, **how: Path) -> subprocess.CompletedProcess:
    return call("make_venv", folder, tools.parent / "requirements.txt", tools=tools, **how)


def works(folder: Path) -> bool:
    """Whether the checkout is importable in it."""
    where = "import megatron_omni; print(megatron_omni.__path__[0])"
    outcome = subprocess.run(
        [folder / "bin/python", "-c", where], cwd=folder, capture_output=True, text=True, check=True
    )
    return outcome.stdout.strip() == str(ROOT / "megatron_omni")


def test_an_environment_is_made_once_and_made_anew_if_that_was_broken_off(tools, tmp_path):
    folder = tmp_path / "a folder" / "venv"
    script(tools / "python", BROKEN_OFF.format(python=sys.executable))
    assert make_venv(folder, tools, python=tools / "python").returncode != 0
    (folder / "half").touch()

    assert make_venv(folder, tools).returncode == 0
    assert works(folder) and not (folder / "half").exists()
    (folder / "mine").touch()
    again = make_venv(folder, tools)
    assert (again.returncode, again.stdout) == (0, "") and (folder / "mine").exists()


def test_an_environment_of_the_users_is_completed_not_made_anew(tools, tmp_path):
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    (folder / "mine").touch()
    assert make_venv(folder, tools).returncode == 0
    assert works(folder) and (folder / "mine").exists()


@pytest.mark.parametrize("function", ["make_venv", "make_rollout_venv"])
def test_another_folder_is_refused_and_left_as_it_is(function, tools, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "mine").touch()
    outcome = call(function, folder, tools=tools)
    assert outcome.returncode == 2
    assert outcome.stderr == f"'{folder}' is no virtual environment. Remove it, or name another folder.\n"
    assert os.listdir(folder) == ["mine"]


def test_requirements_that_could_not_be_installed_are_tried_again(tools, tmp_path):
    folder = tmp_path / "venv"
    (tmp_path / "requirements.txt").write_text(f"{tmp_path}/package\n")
    for _ in range(2):
        assert make_venv(folder, tools).returncode != 0
    assert not list(folder.glob(".installed-*"))
