"""The reference page is the one that the dataclasses give."""

import importlib.util
from dataclasses import fields
from pathlib import Path

from megatron_omni.config.schema import Config

_ROOT = Path(__file__).parents[2]


def _tool():
    specification = importlib.util.spec_from_file_location(
        "config_reference", _ROOT / "tools/config_reference.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_in_docs_is_current():
    tool = _tool()
    assert tool.PAGE.read_text(encoding="utf-8") == tool.reference_page(), (
        "run python tools/config_reference.py"
    )


def test_every_setting_has_a_meaning():
    page = _tool().reference_page()
    for group in fields(Config):
        for setting in fields(group.type):
            row = next(line for line in page.splitlines() if line.startswith(f"| `{setting.name}` "))
            assert len(row.split("|")[5].strip()) > 5
