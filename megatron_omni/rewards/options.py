"""The settings that rewards may be built with, and how they travel to scoring processes."""

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megatron_omni.config.schema import HttpRewardConfig, JudgeConfig


@dataclass(frozen=True)
class RewardOptions:
    """A run's settings for rewards that other servers compute."""

    judge: JudgeConfig = field(default_factory=JudgeConfig)
    http: HttpRewardConfig = field(default_factory=HttpRewardConfig)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(JudgeConfig(**values["judge"]), HttpRewardConfig(**values["http"]))
