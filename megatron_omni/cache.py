"""A bounded cache for values that are costly to compute and asked for in batches."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class BatchCache(Generic[Key, Value]):
    """Keeps the `capacity` most recently used values; computes all that a request lacks in one call."""

    def __init__(self, compute: Callable[[list[Key]], Sequence[Value]], capacity: int):
        self.compute = compute
        self.capacity = capacity
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def __call__(self, keys: Sequence[Key]) -> list[Value]:
        """The values of `keys`, in order."""
        missing = list(dict.fromkeys(key for key in keys if key not in self._values))
        fresh = dict(zip(missing, self.compute(missing), strict=True)) if missing else {}
        result = [fresh[key] if key in fresh else self._values[key] for key in keys]
        for key, value in zip(keys, result, strict=True):
            self._values[key] = value
            self._values.move_to_end(key)
        while len(self._values) > self.capacity:
            self._values.popitem(last=False)
        return result
