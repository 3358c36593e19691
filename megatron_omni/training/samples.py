"""Sample pictures of a run: samples/iter_0000010/000.png …, what is known of each, and a contact sheet."""

import json
import re
import shutil
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

CAPTIONS_FILE = "captions.json"
_CELL = 224
_MARGIN = 12
_LINE = 16


@dataclass(frozen=True)
class SampleCaption:
    """What is known of a picture."""

    prompt: str
    reward: float | None = None
    heldout_reward: float | None = None
    """Score of the second judge."""


def sample_folder(run_folder: Path, iteration: int) -> Path:
    """Where the pictures drawn after `iteration` iterations belong."""
    return run_folder / "samples" / f"iter_{iteration:07d}"


def sample_folders(run_folder: Path) -> dict[int, Path]:
    """The folders of pictures that exist, by iteration, in order."""
    found = {}
    for folder in sorted((run_folder / "samples").glob("iter_*")):
        if match := re.fullmatch(r"iter_(\d+)", folder.name):
            found[int(match[1])] = folder
    return found


def save_samples(folder: Path, images: Tensor, captions: list[SampleCaption]) -> None:
    """Write pictures, captions.json and contact_sheet.png; the folder appears complete or not at all.

    images: [B, 3, H, W] uint8, one a caption.
    """
    beside = folder.with_name(f"tmp_{folder.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    pictures = [Image.fromarray(picture.permute(1, 2, 0).cpu().numpy()) for picture in images]
    entries = []
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        picture.save(beside / f"{number:03d}.png")
        entries.append({"file": f"{number:03d}.png", **asdict(caption)})
    (beside / CAPTIONS_FILE).write_text(json.dumps(entries, indent=1, ensure_ascii=False), encoding="utf-8")
    if pictures:
        _contact_sheet(pictures, captions).save(beside / "contact_sheet.png")
    shutil.rmtree(folder, ignore_errors=True)
    beside.replace(folder)


def load_captions(folder: Path) -> list[tuple[Path, SampleCaption]]:
    """Each picture of a folder with its caption."""
    entries = json.loads((folder / CAPTIONS_FILE).read_text(encoding="utf-8"))
    return [(folder / entry.pop("file"), SampleCaption(**entry)) for entry in entries]


def _contact_sheet(pictures: list[Image.Image], captions: list[SampleCaption]) -> Image.Image:
    """All pictures in a grid, each above its prompt and rewards."""
    columns = min(4, len(pictures))
    rows = -(-len(pictures) // columns)
    width, height = pictures[0].size
    scale = _CELL / max(width, height)
    shown = (max(1, round(width * scale)), max(1, round(height * scale)))
    pitch = shown[0] + _MARGIN, shown[1] + 4 * _LINE + _MARGIN
    sheet = Image.new("RGB", (columns * pitch[0] + _MARGIN, rows * pitch[1] + _MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left = _MARGIN + number % columns * pitch[0]
        top = _MARGIN + number // columns * pitch[1]
        sheet.paste(picture.resize(shown, Image.Resampling.LANCZOS), (left, top))
        prompt = textwrap.wrap(caption.prompt, shown[0] // 6 or 1, max_lines=3, placeholder=" …")
        for line, text in enumerate([_scores(caption), *prompt]):
            draw.text((left, top + shown[1] + 2 + line * _LINE), text, "black", font)
    return sheet


def _scores(caption: SampleCaption) -> str:
    scores = {"reward": caption.reward, "second judge": caption.heldout_reward}
    return "   ".join(f"{name} {score:.3f}" for name, score in scores.items() if score is not None)
