"""The command line: a YAML file and Megatron-style flags that override it."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from megatron_omni.config.io import from_yaml
from megatron_omni.config.schema import Config, RewardWeights
from megatron_omni.errors import UserError

_DESCRIPTION = """Post-train an image model with reinforcement learning.

Settings come from a YAML file, grouped as below; flags override it. torchrun starts several processes."""


_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _reward_weights(type_info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """`--reward ocr`, or `--reward ocr=0.7 judge_score=0.3`."""
    if type_info.type != get_args(RewardWeights)[0]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[=WEIGHT] ...",
        instance_from_str=_names_and_weights,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda weights: [f"{name}={weight:g}" for name, weight in weights.items()],
    )


def _names_and_weights(words: list[str]) -> dict[str, float]:
    weights = {}
    for word in words:
        name, equals, weight = word.partition("=")
        if name in weights:
            raise ValueError(f"{name} is given twice")
        weights[name] = float(weight) if equals else 1.0
    return weights


@dataclass
class _CommandLine:
    config: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """YAML file with settings."""
    settings: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def parse_config(arguments: list[str]) -> Config:
    """The configuration that `--config FILE` and flags give; later flags win over the file.

    A mistaken file raises `UserError`. A mistaken flag prints what was wrong and the nearest flag, and
    exits with status 2; `--help` exits with 0.
    """
    # The file has to be read first: its values are the flags' defaults.
    first_pass = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first_pass.add_argument("--config", default="")
    path = first_pass.parse_known_args(arguments)[0].config
    command_line = tyro.cli(
        _CommandLine,
        args=arguments,
        default=_CommandLine(path, load_config(Path(path)) if path else Config()),
        description=_DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes,),
        registry=_REGISTRY,
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return command_line.settings


def load_config(path: Path) -> Config:
    """The configuration in a YAML file. Raises `UserError`."""
    try:
        return from_yaml(path.read_text(encoding="utf-8"), source=str(path))
    except OSError as error:
        raise UserError(f"configuration file {str(path)!r} cannot be read: {error.strerror}") from error
