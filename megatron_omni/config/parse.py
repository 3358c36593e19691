"""The command line: a YAML file and Megatron-style flags that override it."""

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from megatron_omni.config.io import from_yaml
from megatron_omni.config.schema import Config
from megatron_omni.errors import UserError

_DESCRIPTION = """Post-train an image model with reinforcement learning.

Settings come from a YAML file, grouped as below; flags override it. torchrun starts several processes."""


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
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    return command_line.settings


def load_config(path: Path) -> Config:
    """The configuration in a YAML file. Raises `UserError`."""
    try:
        return from_yaml(path.read_text(encoding="utf-8"), source=str(path))
    except OSError as error:
        raise UserError(f"configuration file {str(path)!r} cannot be read: {error.strerror}") from error
