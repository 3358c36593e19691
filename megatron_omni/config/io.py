"""The YAML form of a configuration: nested by group, strict, and readable by a person."""

import difflib
import json
import re
from dataclasses import asdict, fields
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError

_SETTINGS = {group.name: [setting.name for setting in fields(group.type)] for group in fields(Config)}
_GROUP_OF = {setting: group for group, settings in _SETTINGS.items() for setting in settings}
_ADAPTER = TypeAdapter(Config)
_FLOAT = re.compile(r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$")


class _Loader(yaml.SafeLoader):
    """PyYAML reads `1e-5` as a string and lets a repeated key win silently; here neither may happen."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            keys = [key.value for key, _ in node.value]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise yaml.MarkedYAMLError(problem=f"{repeated!r} is given twice", problem_mark=node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """PyYAML writes Unicode's line breaks bare and reads them back as something else, unless quoted."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = '"' if re.search("[\x85\u2028\u2029]", text) else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def to_yaml(config: Config) -> str:
    """Every setting of `config` as YAML, grouped and in the order of the schema."""
    return yaml.dump(asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def from_yaml(text: str, source: str = "configuration") -> Config:
    """The configuration that `text` describes; settings it leaves out have their defaults.

    Raises `UserError`, naming `source`, each setting at fault, its value and what is allowed.
    """
    try:
        document = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(document, dict | None):
        raise UserError(f"{source} must map groups ({', '.join(_SETTINGS)}) to settings")
    # A group whose lines are all commented out reads as null.
    groups = {name: group for name, group in (document or {}).items() if group is not None}
    try:
        # JSON mode is strict about types, yet takes a list for a tuple and a mapping for a dataclass.
        as_json = json.dumps(groups, default=str)
        return _ADAPTER.validate_json(as_json, strict=True, extra="forbid")
    except ValidationError as error:
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors())
        raise UserError(f"{source} cannot be used:\n{faults}") from error


def _explain(fault: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "unexpected_keyword_argument":
        return f"{where} is unknown. {_suggestion([str(part) for part in fault['loc']])}"
    allowed = fault["msg"].replace("Input should be", "must be").replace("an object", "a mapping of settings")
    return f"{where} {allowed}, not {fault['input']!r}"


def _suggestion(path: list[str]) -> str:
    """What an unknown group, or an unknown setting of a group, was probably meant to be."""
    name = path[-1].replace("-", "_")
    siblings = (
        [f"{path[0]}.{setting}" for setting in _SETTINGS.get(path[0], [])] if path[1:] else list(_SETTINGS)
    )
    if name in _GROUP_OF and _GROUP_OF[name] != path[0]:
        return f"It belongs to another group: {_GROUP_OF[name]}.{name}"
    full_name = ".".join([*path[:-1], name])
    close = difflib.get_close_matches(full_name, siblings, 1) or difflib.get_close_matches(name, _GROUP_OF, 1)
    return f"Did you mean {close[0]}?" if close else f"Known here: {', '.join(siblings)}"
