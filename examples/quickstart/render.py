"""The task of the quickstart: a small sign with four capitals on it."""

import random
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 96, 48
LENGTH = 4
FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSansMono-Bold.ttf"
FONT_SIZE = (0.6, 0.7)
"""Smallest and largest font size, as a share of the height."""
JITTER = 0.03
"""Largest shift of the text from the centre, as a share of the width and of the height."""
GROUND = (235, 255)
NOISE = 3.0
"""Standard deviation of the ground's noise, in grey levels."""


def prompt(text: str) -> str:
    """The prompt that asks for `text`."""
    return f'A sign that says "{text}"'


def render(text: str, seed: int) -> np.ndarray:
    """A picture of `text`, black on a light, noisy ground: [HEIGHT, WIDTH] uint8. `seed` decides the rest."""
    rng = random.Random(seed)
    font = load_font(round(rng.uniform(*FONT_SIZE) * HEIGHT))
    image = Image.new("L", (WIDTH, HEIGHT), rng.randint(*GROUND))
    left = WIDTH / 2 + rng.uniform(-JITTER, JITTER) * WIDTH
    middle = HEIGHT / 2 + rng.uniform(-JITTER, JITTER) * HEIGHT
    ImageDraw.Draw(image).text((left, middle), text, font=font, fill=0, anchor="mm")
    noise = np.random.default_rng(seed).normal(0, NOISE, (HEIGHT, WIDTH))
    return (np.asarray(image) + noise).clip(0, 255).round().astype(np.uint8)


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(FONT, size)
