"""Does the picture show the text that the prompt quotes? Read by OCR, compared by edit distance."""

from abc import abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
from PIL import Image

from megatron_omni.errors import UserError
from megatron_omni.rewards.base import Reward
from megatron_omni.rewards.text import target_text, text_similarity

MAX_LINE_HEIGHT = 64
"""Pictures up to this height in pixels are read as one line of text; in taller ones, text is found first."""


class LineRecogniser:
    """A PP-OCR recognition model (CTC over characters) on pictures that hold one line of text, batched."""

    HEIGHT = 48
    BATCH_SIZE = 16

    def __init__(self, model: Path):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        characters = self.session.get_modelmeta().custom_metadata_map["character"].split("\n")
        self.characters = ["", *characters, " "]  # class 0 is CTC's blank

    def __call__(self, images: np.ndarray) -> list[str]:
        """images: [B, H, W, 3] uint8, BGR."""
        batches = range(0, len(images), self.BATCH_SIZE)
        return [text for start in batches for text in self._read(images[start : start + self.BATCH_SIZE])]

    def _read(self, images: np.ndarray) -> list[str]:
        width = round(images.shape[2] * self.HEIGHT / images.shape[1])
        resized = np.stack([cv2.resize(image, (width, self.HEIGHT)) for image in images])
        inputs = resized.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
        (scores,) = self.session.run(None, {self.session.get_inputs()[0].name: inputs})
        return [self._decode(row) for row in scores.argmax(-1)]

    def _decode(self, classes: np.ndarray) -> str:
        """Greedy CTC: repeated classes count once, blanks not at all."""
        starts = np.flatnonzero(np.diff(classes, prepend=-1))
        return "".join(self.characters[index] for index in classes[starts])


class TextReward(Reward):
    """Similarity of the picture's text with the row's "target", or else with the prompt's quoted text."""

    @abstractmethod
    def read_lines(self, images: np.ndarray) -> list[str]:
        """Texts of pictures that hold one line each. images: [B, H, W, 3] uint8, BGR."""

    @abstractmethod
    def read_page(self, image: np.ndarray) -> str:
        """All text found in a picture, in reading order. image: [H, W, 3] uint8, BGR."""

    def check_prompt(self, metadata: dict[str, Any]) -> None:
        target_text(metadata)

    def score(self, images: np.ndarray, metadata: list[dict[str, Any]]) -> list[float]:
        bgr = np.ascontiguousarray(images[..., ::-1])
        if images.shape[1] <= MAX_LINE_HEIGHT:
            texts = self.read_lines(bgr)
        else:
            texts = [self.read_page(image) for image in bgr]
        return [text_similarity(text, target_text(row)) for text, row in zip(texts, metadata, strict=True)]


class OcrReward(TextReward):
    """Reads with PP-OCRv6 of the package rapidocr, which carries the models."""

    def __init__(self):
        import rapidocr

        cv2.setNumThreads(1)
        models = Path(rapidocr.__file__).parent / "models"
        self.recogniser = LineRecogniser(models / "PP-OCRv6_rec_small.onnx")

    def read_lines(self, images: np.ndarray) -> list[str]:
        return self.recogniser(images)

    def read_page(self, image: np.ndarray) -> str:
        return " ".join(self._engine(image, use_cls=False).txts or ())

    @cached_property
    def _engine(self):
        from rapidocr import RapidOCR

        threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
        return RapidOCR(params={**threads, "Global.log_level": "critical"})


class HeldOutOcrReward(TextReward):
    """Reads with ddddocr, a model of another family: a judge to log beside `OcrReward`, never to train on."""

    def __init__(self):
        import ddddocr

        self.model = ddddocr.DdddOcr(show_ad=False)

    def read_lines(self, images: np.ndarray) -> list[str]:
        return [self.model.classification(Image.fromarray(image[..., ::-1])) for image in images]

    def read_page(self, image: np.ndarray) -> str:
        raise UserError(
            f"reward 'ocr_heldout' reads one line of text, but a picture is {image.shape[0]} pixels high "
            f"(at most {MAX_LINE_HEIGHT}); choose another eval_reward"
        )
