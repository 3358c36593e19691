"""Writes the quickstart's data: prompts to train on, held-out prompts, and pictures for supervised training.

    python examples/quickstart/data.py [--pictures 16000]

`data/train.txt` and `data/heldout.txt` (one prompt a line) are for reinforcement learning and come with the
repository; `data/supervised/` (`data.jsonl` with "prompt" and "image", and PNG files) is written here. No
string occurs twice, in one file or in two.
"""

import argparse
import itertools
import json
import random
import string
from functools import cache
from pathlib import Path

from PIL import Image
from render import LENGTH, prompt, render

DATA = Path(__file__).parent / "data"
LETTERS = string.ascii_uppercase.replace("O", "")  # OCR cannot tell an O from a zero
HELD_OUT = 256
TRAIN = 2048


@cache
def strings() -> list[str]:
    """All strings of LENGTH letters in a fixed random order."""
    every = ["".join(letters) for letters in itertools.product(LETTERS, repeat=LENGTH)]
    random.Random(0).shuffle(every)
    return every


def held_out_strings() -> list[str]:
    return strings()[:HELD_OUT]


def supervised_strings(count: int) -> list[str]:
    return strings()[HELD_OUT + TRAIN :][:count]


def write_prompts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(prompt(text) + "\n" for text in texts))


def write_pictures(folder: Path, texts: list[str]) -> None:
    """PNG files, and `data.jsonl` that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed, text in enumerate(texts):
        name = f"{seed:05d}.png"
        Image.fromarray(render(text, seed)).save(folder / name, compress_level=1)
        rows.append(json.dumps({"prompt": prompt(text), "image": name}) + "\n")
    (folder / "data.jsonl").write_text("".join(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=16000, help="pictures for supervised training")
    count = parser.parse_args().pictures
    DATA.mkdir(exist_ok=True)
    write_prompts(DATA / "heldout.txt", held_out_strings())
    write_prompts(DATA / "train.txt", strings()[HELD_OUT:][:TRAIN])
    write_pictures(DATA / "supervised", supervised_strings(count))


if __name__ == "__main__":
    main()
