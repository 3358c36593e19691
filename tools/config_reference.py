"""Write docs/configuration.md, the reference of every setting, from the dataclasses."""

import json
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import docstring_parser

from megatron_omni.config.schema import Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

_INTRODUCTION = """# Configuration

Written by `python tools/config_reference.py` from `megatron_omni/config/schema.py`: edit that file, not this.

Every setting has one name. In a YAML file it stands under its group; as a flag it stands alone, and flags win
over the file:

```yaml
# run.yaml
model:
  model_path: weights/my-model
training:
  micro_batch_size: 8
```
```
python pretrain_rl.py --config run.yaml --micro-batch-size 4
```

An unknown name or a wrong value is an error that says what was meant or what is allowed. The settings a run
really used are saved as `config.yaml` in its folder, which can be given to `--config` again.
"""


def reference_page() -> str:
    """The whole page, as Markdown: one table a group."""
    return "\n".join([_INTRODUCTION, *(_section(group) for group in fields(Config))])


def _section(group: Field) -> str:
    documentation = docstring_parser.parse_from_object(group.type)
    meaning = {entry.arg_name: entry.description for entry in documentation.params}
    rows = [
        (f"`{setting.name}`", _flag(setting), _type(setting.type), _default(setting), meaning[setting.name])
        for setting in fields(group.type)
    ]
    return "\n".join(
        [
            f"## {group.name}",
            "",
            f"{documentation.short_description}",
            "",
            "| Setting | Flag | Type | Default | Meaning |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    )


def _flag(setting: Field) -> str:
    name = setting.name.replace("_", "-")
    return f"`--{name}`, `--no-{name}`" if setting.type is bool else f"`--{name}`"


def _type(annotation: object) -> str:
    """A type as a reader says it: 'int', 'a, b or c', 'int, int or none'."""
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_type(option) for option in get_args(annotation))
    if get_origin(annotation) is Literal:
        *most, last = (f"`{choice}`" for choice in get_args(annotation))
        return f"{', '.join(most)} or {last}"
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return " → ".join(_type(item) for item in get_args(annotation))
    if get_origin(annotation) is tuple:
        return ", ".join(_type(item) for item in get_args(annotation))
    if annotation is Ellipsis:
        return "…"
    return "none" if annotation is NoneType else annotation.__name__


def _default(setting: Field) -> str:
    if setting.default is None:
        return "none"
    if setting.default is MISSING:
        return f"`{json.dumps(setting.default_factory())}`"
    if isinstance(setting.default, tuple):
        return f"`{' '.join(setting.default)}`"
    return f'`"{setting.default}"`' if setting.default in ("", " ") else f"`{setting.default}`"


if __name__ == "__main__":
    PAGE.write_text(reference_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
