"""Finding rewards, algorithms, models and engines by name, or by a `module:function` path."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from megatron_omni.errors import UserError


class Registry:
    """Names of one kind of component and the import paths they stand for.

    Paths are strings, so that naming a component never imports it: `Registry("reward", {"ocr":
    "megatron_omni.rewards.ocr:OcrReward"})`.
    """

    def __init__(self, kind: str, paths: dict[str, str]):
        self.kind = kind
        self.paths = dict(paths)

    def get(self, name: str) -> Callable[..., Any]:
        """The object called `name`, or the one at the path `name` if it has the form `module:attribute`."""
        if ":" in name:
            return self._load(name)
        if name in self.paths:
            return self._load(self.paths[name])
        close = difflib.get_close_matches(name, self.paths, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(sorted(self.paths))}; "
            "a path 'package.module:function' works too."
        )

    def _load(self, path: str) -> Callable[..., Any]:
        module, _, attribute = path.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(f"{self.kind} {path!r} cannot be loaded: {error}") from error
