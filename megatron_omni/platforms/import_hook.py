"""Running code right after a module of a package has been imported."""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(package: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action(module)` for every module below `package`: those imported already and those to come."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package + "."):
            action(module)
    sys.meta_path.insert(0, _AfterImport(package, action))


class _AfterImport(MetaPathFinder):
    def __init__(self, package: str, action: Callable[[ModuleType], None]):
        self.prefix = package + "."
        self.action = action

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if not name.startswith(self.prefix):
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._then_act(spec.loader.exec_module)
        return spec

    def _then_act(self, exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def exec_module_then_act(module: ModuleType) -> None:
            exec_module(module)
            self.action(module)

        return exec_module_then_act
