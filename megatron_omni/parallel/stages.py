"""Pipeline stages: which layers each holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One of the `count` parts that a model's layers are cut into, in the order of computation."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """Global numbers of this stage's layers; stages differ by one at most, earlier ones have more."""
        sizes = split_sizes(total, self.count)
        start = sum(sizes[: self.index])
        return range(start, start + sizes[self.index])


WHOLE_MODEL = Stage()


def split_sizes(total: int, parts: int) -> list[int]:
    """Sizes of `parts` shares of `total`, as equal as can be, larger ones first (`torch.tensor_split`'s)."""
    return [total // parts + (part < total % parts) for part in range(parts)]
