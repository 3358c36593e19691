"""The judges that have names. Each is a template, an answer and a number made of it."""

from typing import Any

from pydantic import Field

from megatron_omni.rewards.judge import TEMPLATES, JudgeAnswer, JudgeReward
from megatron_omni.rewards.text import target_text, text_similarity


class OcrJudge(JudgeReward):
    """Reads the picture's text, which is compared with the row's "target" or the prompt's quoted text.

    The question leaves out the text to be found: a judge that knows it is prone to see it.
    """

    class Answer(JudgeAnswer):
        text: str

    template = TEMPLATES / "judge_ocr.jinja"
    max_tokens = 512

    def check_prompt(self, metadata: dict[str, Any]) -> None:
        target_text(metadata)
        super().check_prompt(metadata)

    def value(self, answer: Answer, metadata: dict[str, Any]) -> float:
        return text_similarity(answer.text, target_text(metadata))


class ScoreJudge(JudgeReward):
    """How well the picture shows what the prompt says: a whole number from 0 to 10, mapped to 0 to 1."""

    class Answer(JudgeAnswer):
        score: int = Field(ge=0, le=10)

    template = TEMPLATES / "judge_score.jinja"

    def value(self, answer: Answer, metadata: dict[str, Any]) -> float:
        return answer.score / 10
