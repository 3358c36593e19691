"""Asking a vision-language model about a picture, over an OpenAI-compatible API such as vLLM's."""

import base64
import io
import os
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jinja2
import numpy as np
import openai
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_omni.config.schema import JudgeConfig
from megatron_omni.errors import UserError
from megatron_omni.rewards.base import Reward, Unscored
from megatron_omni.rewards.endpoints import Endpoints, TransientError, is_local, is_transient
from megatron_omni.rewards.options import RewardOptions

TEMPLATES = Path(__file__).parent / "templates"
SEED = 0
CHECK_TIMEOUT = 10.0
"""Seconds that a server may take to say, at the start, which models it has."""


class JudgeAnswer(BaseModel):
    """The JSON that a judge must answer with, no more and no less. Its fields are the schema sent along."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JudgeReward(Reward):
    """A question about each picture, whose answer becomes a number.

    A kind of judge is a subclass with a template (the question), an `Answer` (what it must be answered with)
    and `value` (the number). The model answers greedily, with a fixed seed, in JSON that the server holds to
    the schema; whatever is not that JSON, whole, masks the sample.
    """

    template: ClassVar[Path]
    """jinja2 template of the question; it sees the prompt set's row, "prompt" and more."""
    Answer: ClassVar[type[JudgeAnswer]]
    max_tokens: ClassVar[int] = 64
    """Tokens of an answer at most; a longer one masks the sample."""

    batch_size = 1

    def __init__(self, settings: JudgeConfig):
        self.settings = settings
        self.question = _load(self.template, settings.judge_templates)
        self.endpoints = Endpoints(
            [_client(url, settings.judge_timeout) for url in settings.judge_urls], settings.judge_retries
        )
        self.concurrency = settings.judge_concurrency
        self.time_limit = self.endpoints.time_limit(settings.judge_timeout)

    @classmethod
    def from_options(cls, options: RewardOptions) -> Self:
        return cls(options.judge)

    @abstractmethod
    def value(self, answer: Any, metadata: dict[str, Any]) -> float:
        """The reward. answer: an `Answer` of this class."""

    def check_prompt(self, metadata: dict[str, Any]) -> None:
        try:
            self._text(metadata)
        except jinja2.TemplateError as error:
            raise UserError(
                f"the judge's template {self.question.filename} does not suit the prompt "
                f"{metadata['prompt']!r}: {error}; it sees the row's {', '.join(metadata)}"
            ) from error

    def check_prompts(self, metadata: list[dict[str, Any]]) -> None:
        """Also that a server answers, and that each one which does has the model."""
        super().check_prompts(metadata)
        self._check_servers()

    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        return [self._score(image, row) for image, row in zip(images, metadata, strict=True)]

    def _score(self, image: np.ndarray, metadata: dict[str, Any]) -> float:
        request = {
            "model": self.settings.judge_model,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": png_url(image)}},
                        {"type": "text", "text": self._text(metadata)},
                    ],
                }
            ],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": self.Answer.model_json_schema()},
            },
            "temperature": 0,
            "seed": SEED,
            "max_tokens": self.max_tokens,
        }
        body = self.endpoints.call(lambda client: _complete(client, request))
        content = _parse(_Completion, body).choices[0].message.content
        return self.value(_parse(self.Answer, content), metadata)

    def _text(self, metadata: dict[str, Any]) -> str:
        return self.question.render(metadata).strip()

    def _check_servers(self) -> None:
        model, errors = self.settings.judge_model, []
        for url in self.settings.judge_urls:
            try:
                answer = _client(url, CHECK_TIMEOUT).models.with_raw_response.list()
                served = [each.id for each in _parse(_Models, answer.content).data]
            except (openai.OpenAIError, Unscored) as error:
                errors.append(f"{url}: {error}")
                continue
            if model not in served:
                raise UserError(
                    f"the judge at {url} serves {', '.join(served) or 'no model'}, not judge_model {model!r}"
                )
        if len(errors) == len(self.settings.judge_urls):
            raise UserError(
                f"no judge answers ({'; '.join(errors)}); start one (vllm serve {model}), or set judge_urls"
            )


def png_url(image: np.ndarray) -> str:
    """The picture as a data URL, without loss. image: [H, W, 3] uint8, RGB."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class _Message(BaseModel):
    content: str


class _Choice(BaseModel):
    finish_reason: Literal["stop"]
    message: _Message


class _Completion(BaseModel):
    """What of a chat completion must be there; an answer that was cut short has another finish reason."""

    choices: list[_Choice] = Field(min_length=1, max_length=1)


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


def _client(url: str, timeout: float) -> openai.OpenAI:
    key = os.environ.get("OPENAI_API_KEY", "none")  # vLLM asks for none; a secret is no setting to be saved
    http = openai.DefaultHttpxClient(trust_env=not is_local(url))
    return openai.OpenAI(base_url=url, api_key=key, timeout=timeout, max_retries=0, http_client=http)


def _complete(client: openai.OpenAI, request: dict[str, Any]) -> bytes:
    """The answer's body, unread."""
    try:
        return client.chat.completions.with_raw_response.create(**request).content
    except openai.APIConnectionError as error:
        raise TransientError(f"judge {client.base_url}: {error} {error.__cause__ or ''}".strip()) from error
    except openai.APIStatusError as error:
        message = f"judge {client.base_url}: HTTP {error.status_code}: {error.message[:500]}"
        raise (TransientError if is_transient(error.status_code) else Unscored)(message) from error


def _parse(kind: type[BaseModel], text: str | bytes) -> Any:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        raise Unscored(
            f"the judge's answer cannot be used: {where} {fault['msg']}, not {fault['input']!r:.60}; "
            f"it begins {text[:200]!r}"
        ) from error


def _load(packaged: Path, folder: str) -> jinja2.Template:
    path = Path(folder) / packaged.name if folder else packaged
    if not path.is_file():
        raise UserError(
            f"judge_templates {folder!r} has no {packaged.name}; copy {packaged} there to start from"
        )
    loader = jinja2.FileSystemLoader(path.parent)
    try:
        return jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined).get_template(path.name)
    except jinja2.TemplateError as error:
        raise UserError(f"the judge's template {path} cannot be used: {error}") from error
