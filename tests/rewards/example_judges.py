"""Judges as a user may write them; scoring processes import this module."""

import zlib
from pathlib import Path
from typing import Literal

from megatron_omni.rewards.judge import JudgeAnswer, JudgeReward
from megatron_omni.rewards.judges import OcrJudge


class ColourJudge(JudgeReward):
    class Answer(JudgeAnswer):
        colour: Literal["red", "green", "blue"]

    template = Path(__file__).parent / "example_colour.jinja"

    def value(self, answer, metadata):
        return float(answer.colour == metadata["colour"])


class ReadText(OcrJudge):
    """A number that tells texts apart."""

    def value(self, answer, metadata):
        return float(zlib.crc32(answer.text.encode()) % 2**20)
