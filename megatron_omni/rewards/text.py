"""Which text a prompt asks for, and how like it a text that was read is."""

import re
from typing import Any

from rapidfuzz.distance import Levenshtein

from megatron_omni.errors import UserError

_DOUBLE_QUOTED = re.compile(r'(?<![\d¼½¾])"([^"]+)"|“([^”]+)”')  # a mark after a number means inches
_SINGLE_QUOTED = re.compile(
    r"(?<!\w)'(.+?)'(?!\w)|‘(.+?)’(?!\w)"
)  # an apostrophe has a letter on either side


def target_text(metadata: dict[str, Any]) -> str:
    """The row's "target", or else the text its prompt quotes. Raises `UserError` if there is neither."""
    target = str(metadata.get("target") or quoted_text(metadata["prompt"]))
    if not target.strip():
        raise UserError(
            f"OCR reward: the prompt {metadata['prompt']!r} does not say which text to draw; quote it "
            '("OPEN"), or give the row a "target"'
        )
    return target


def quoted_text(prompt: str) -> str:
    """The text a prompt quotes; several quotations are joined in order. Empty if there is none.

    Straight and curly double quotes count, and single ones where the prompt has no double ones.
    """
    for pattern in (_DOUBLE_QUOTED, _SINGLE_QUOTED):
        if found := ["".join(groups) for groups in pattern.findall(prompt)]:
            return " ".join(found).strip()
    return ""


def text_similarity(read: str, target: str) -> float:
    """1 − min(edit distance, length) / length, length that of `target`; case and white space do not count.

    Flow-GRPO's OCR reward (arXiv 2505.05470) without the full score its code gives to `target` inside other
    text: with that, appended junk would be perfect.
    """
    read, target = ("".join(text.casefold().split()) for text in (read, target))
    return 1 - min(Levenshtein.distance(read, target), len(target)) / len(target)
