import random

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

from megatron_omni.errors import UserError
from megatron_omni.rewards.ocr import HeldOutOcrReward, OcrReward
from megatron_omni.rewards.text import quoted_text, text_similarity

FONT = font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans Mono", weight="bold"))
NOISE = np.random.default_rng(0).integers(0, 256, (8, 48, 96, 3), dtype=np.uint8)


def line(text: str) -> np.ndarray:
    """`text` in black on a light, noisy ground, 96×48."""
    image = Image.new("RGB", (96, 48), (235, 235, 235))
    font = ImageFont.truetype(FONT, min(31, int(140 / max(len(text), 1))))
    ImageDraw.Draw(image).text((48, 24), text, (0, 0, 0), font, anchor="mm")
    noise = np.random.default_rng(len(text)).normal(0, 6, (48, 96, 3))
    return np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)


def scene(text: str, size: int = 512) -> np.ndarray:
    """A sign with `text` somewhere on a soft coloured ground."""
    rng = np.random.default_rng(len(text))
    ground = cv2.resize(
        rng.integers(60, 230, (6, 6, 3), dtype=np.uint8), (size, size), interpolation=cv2.INTER_CUBIC
    )
    image = Image.fromarray(ground)
    draw = ImageDraw.Draw(image)
    draw.rectangle((60, 300, 460, 400), fill=(250, 245, 230))
    draw.text((260, 350), text, (30, 10, 60), ImageFont.truetype(FONT, 36), anchor="mm")
    return np.asarray(image)


def asks(*texts: str) -> list[dict]:
    return [{"prompt": f'a sign that says "{text}"'} for text in texts]


@pytest.fixture(scope="module", params=[OcrReward, HeldOutOcrReward])
def reward(request):
    return request.param()


def test_clean_text_scores_about_one(reward):
    rng = random.Random(0)
    # Without O and I, which are a matter of taste beside 0 and L.
    texts = ["".join(rng.choices("ABCDEFGHJKLMNPQRSTUVWXYZ", k=4)) for _ in range(40)]
    scores = reward.score(np.stack([line(text) for text in texts]), asks(*texts))
    assert np.mean(scores) > 0.97
    assert np.mean(np.array(scores) == 1) > 0.9


def test_blank_noise_and_wrong_text_score_about_zero(reward):
    blank = np.full((1, 48, 96, 3), 235, np.uint8)
    pictures = np.concatenate([blank, NOISE, line("7391")[None]])
    scores = reward.score(pictures, asks(*["WXYZ"] * len(pictures)))
    assert scores[0] == scores[-1] == 0
    assert np.mean(scores[1:-1]) < 0.1


def test_a_wrong_letter_costs_its_share_and_appended_junk_costs_too(reward):
    pictures = np.stack([line("TREE"), line("TRFE"), line("TREEQR"), line("tree")])
    assert reward.score(pictures, asks(*["TREE"] * 4)) == pytest.approx([1, 0.75, 0.5, 1])


def test_text_anywhere_in_a_large_picture_is_found():
    reward = OcrReward()
    texts = ["Hello World", "OPEN"]
    scores = reward.score(np.stack([scene(text) for text in texts]), asks(*texts))
    assert scores == [1, 1]


def test_a_large_picture_without_text_scores_zero():
    assert OcrReward().score(np.stack([scene("")]), asks("OPEN")) == [0]


def test_scores_do_not_depend_on_the_batch(reward):
    texts = ["WXYZ", "KLMN", "ABCD", "HJKT"] * 5
    pictures = np.stack([line(text) for text in texts])
    noisy = np.clip(pictures + np.random.default_rng(1).normal(0, 60, pictures.shape), 0, 255).astype(
        np.uint8
    )
    metadata = asks(*texts)
    whole = reward.score(noisy, metadata)
    assert whole == [reward.score(noisy[i : i + 1], metadata[i : i + 1])[0] for i in range(len(texts))]


def test_the_heldout_judge_refuses_what_it_cannot_read():
    with pytest.raises(UserError, match="512 pixels high"):
        HeldOutOcrReward().score(np.stack([scene("OPEN")]), asks("OPEN"))


def test_repeated_classes_count_once_and_blanks_not_at_all():
    read = OcrReward().recogniser
    a, b = read.characters[5], read.characters[7]
    assert read._decode(np.array([0, 5, 5, 0, 5, 7, 7, 0])) == a + a + b


def test_a_row_with_a_target_needs_no_quotes(reward):
    row = {"prompt": "a sign", "target": "TREE"}
    reward.check_prompt(row)
    assert reward.score(np.stack([line("TREE")]), [row]) == [1]


@pytest.mark.parametrize("prompt", ["a sign", 'a sign "', 'a " " sign', "the dog's owner's sign", ""])
def test_a_prompt_without_quoted_text_is_an_error_that_shows_it(reward, prompt):
    with pytest.raises(UserError, match="quote it") as error:
        reward.check_prompt({"prompt": prompt})
    assert repr(prompt) in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ('a sign "OPEN"', "OPEN"),
        ("a sign “New York” at night", "New York"),
        ("a sign 'OPEN'", "OPEN"),
        ("a sign ‘OPEN’.", "OPEN"),
        ("the dog's sign 'It's open' here", "It's open"),
        ("""the dogs' sign "Don't 'park'" here""", "Don't 'park'"),
        ('"Stop", then "Go"', "Stop Go"),
        ('a 12" pizza with the word "OPEN"', "OPEN"),
        ('a 12" by 14" frame around "GATE 7", "8" and a 3½" disk', "GATE 7 8"),
        ("a 6' man with a 12\" and a 14\" pizza and the word 'OPEN'", "OPEN"),
        ("a 12” pizza with the word “OPEN”", "OPEN"),
        ('一块写着"营业中"的招牌', "营业中"),
    ],
)
def test_the_quoted_text_is_found(prompt, text):
    assert quoted_text(prompt) == text


WORDS = st.text("abcABC 019,.é中", min_size=1, max_size=8).map(str.strip).filter(bool)
QUOTES = ['""', "“”"]
INCHES = st.from_regex(r'[0-9]+(\.[0-9])?["”](x[0-9]+["”])?', fullmatch=True)


@given(st.lists(st.tuples(st.sampled_from(QUOTES), WORDS) | WORDS | INCHES))
def test_all_that_is_quoted_and_nothing_else_is_found_among_words_and_inches(parts):
    prompt = " ".join(part if isinstance(part, str) else part[1].join(part[0]) for part in parts)
    assert quoted_text(prompt) == " ".join(part[1] for part in parts if not isinstance(part, str))


@given(st.text(min_size=1).filter(lambda t: "".join(t.casefold().split())), st.text(), st.text())
def test_similarity_is_one_for_the_target_alone(target, before, after):
    assert text_similarity(target, target) == text_similarity(f" {target.lower()} ", target.lower()) == 1
    assert 0 <= text_similarity(before + target + after, target) <= 1
    if (before + after).strip():
        assert text_similarity(before + target + after, target) < 1
    assert text_similarity("", target) == 0
