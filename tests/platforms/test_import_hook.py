"""Acting on modules as they are imported."""

import importlib
import sys
from pathlib import Path

import pytest

from megatron_omni.platforms.import_hook import after_import

FILES = {
    "toy_package/__init__.py": "",
    "toy_package/early.py": "value = 1",
    "toy_package/room/__init__.py": "from toy_package.room.inner import value",
    "toy_package/room/inner.py": "value = 2",
    "toy_package_not.py": "value = 3",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith("toy_package")]:
        del sys.modules[name]


def test_each_module_is_acted_on_once_after_its_code_ran_whether_imported_before_or_later(package):
    importlib.import_module("toy_package.early")
    seen = []
    after_import("toy_package", lambda module: seen.append((module.__name__, getattr(module, "value", None))))
    assert seen == [("toy_package.early", 1)]
    importlib.import_module("toy_package.room")
    importlib.import_module("toy_package_not")
    assert seen[1:] == [("toy_package.room.inner", 2), ("toy_package.room", 2)]


def test_two_actions_both_happen(package):
    seen = []
    after_import("toy_package", lambda module: seen.append("first"))
    after_import("toy_package", lambda module: seen.append("second"))
    importlib.import_module("toy_package.early")
    assert sorted(seen) == ["first", "second"]


def test_an_absent_module_is_reported_as_ever(package):
    after_import("toy_package", print)
    with pytest.raises(ModuleNotFoundError, match=r"toy_package\.absent"):
        importlib.import_module("toy_package.absent")
