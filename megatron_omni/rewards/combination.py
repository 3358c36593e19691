"""Several rewards of the same samples."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_omni.errors import UserError


@dataclass(frozen=True)
class GlobalRewards:
    """Scores of all processes' samples, in the order of data-parallel ranks. R rewards, B samples in all."""

    weights: dict[str, float]
    """Of the R rewards, by name."""
    parts: Tensor
    """[R, B] float32, each reward's own values."""
    parts_valid: Tensor
    """[R, B] bool."""
    prompt_id: Tensor
    """[B] int64."""
    error: str = ""
    """What the last failure was, of those that this process knows of."""

    @property
    def valid(self) -> Tensor:
        """[B] bool: where every reward gave a value."""
        return self.parts_valid.all(0)

    @property
    def values(self) -> Tensor:
        """[B] float32, the weighted sums; meaningless where `valid` is false."""
        weights = self.parts.new_tensor(list(self.weights.values()))
        return (weights[:, None] * self.parts).sum(0)

    @property
    def failed(self) -> int:
        return int((~self.valid).sum())

    @staticmethod
    def concatenate(parts: "list[GlobalRewards]") -> "GlobalRewards":
        """Of more samples."""
        errors = [part.error for part in parts if part.error]
        return GlobalRewards(
            parts[0].weights,
            torch.cat([part.parts for part in parts], 1),
            torch.cat([part.parts_valid for part in parts], 1),
            torch.cat([part.prompt_id for part in parts]),
            errors[-1] if errors else "",
        )

    def require_some(self) -> None:
        """Raise `UserError` if no sample has a reward, or one of the rewards failed on all."""
        last = f"the last error was: {self.error or '?'}"
        for name, failures in self.failures().items():
            if failures == len(self.prompt_id):
                raise UserError(f"every sample's reward failed ({name}); {last}")
        if not self.valid.any():
            raise UserError(f"every sample failed with one reward or another; {last}")

    def valid_values(self) -> Tensor:
        return self.values[self.valid]

    def means(self) -> dict[str, float]:
        """Each reward's mean over the samples that it gave a value."""
        rows = zip(self.weights, self.parts, self.parts_valid, strict=True)
        return {name: float(values[valid].mean()) for name, values, valid in rows}

    def failures(self) -> dict[str, int]:
        """How many samples each reward failed on."""
        return dict(zip(self.weights, (~self.parts_valid).sum(1).tolist(), strict=True))
