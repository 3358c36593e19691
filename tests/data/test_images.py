import json

import numpy as np
import pytest
import torch
from PIL import Image

from megatron_omni.data.images import ImageSet
from megatron_omni.errors import UserError


@pytest.fixture
def image_set(tmp_path):
    """Six 8×4 pictures with random pixels; returns the row file and the pixels [6, 4, 8, 3]."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 8, 3), dtype=np.uint8)
    (tmp_path / "pictures").mkdir()
    rows = []
    for index, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / "pictures" / f"{index}.png")
        rows.append({"prompt": f"picture {index}", "image": f"pictures/{index}.png"})
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path, pixels


def test_images_come_as_they_are_on_disk(image_set):
    path, pixels = image_set
    images = ImageSet.from_file(path, height=4, width=8)
    rows = images.batch(iteration=5, size=4, seed=1)
    loaded = images.load(rows)
    assert loaded.dtype == torch.uint8 and loaded.shape == (4, 3, 4, 8) and loaded.is_contiguous()
    for row, image in zip(rows, loaded, strict=True):
        assert (image.permute(1, 2, 0).numpy() == pixels[int(row.prompt.split()[1])]).all()


def test_every_image_is_seen_once_an_epoch(image_set):
    images = ImageSet.from_file(image_set[0], 4, 8)
    seen = [row.index for iteration in range(3) for row in images.batch(iteration, 2, seed=0)]
    assert sorted(seen) == list(range(6)) and len(images) == 6


def test_grey_and_transparent_images_become_rgb(image_set, tmp_path):
    Image.new("L", (8, 4), 7).save(tmp_path / "pictures/0.png")
    Image.new("RGBA", (8, 4), (1, 2, 3, 255)).save(tmp_path / "pictures/1.png")
    images = ImageSet.from_file(image_set[0], 4, 8)
    loaded = images.load(images.prompts.rows[:2])
    assert loaded[0].unique().tolist() == [7]
    assert loaded[1, :, 0, 0].tolist() == [1, 2, 3]


def test_a_wrong_size_is_an_error_at_once_that_names_the_file(image_set):
    with pytest.raises(UserError, match=r"0\.png' is 8×4 pixels.*width 4 and height 8"):
        ImageSet.from_file(image_set[0], height=8, width=4)


@pytest.mark.parametrize("content", [None, b"", b"no image"])
def test_a_missing_or_foreign_file_is_an_error_at_once(image_set, tmp_path, content):
    broken = tmp_path / "pictures/3.png"
    broken.unlink() if content is None else broken.write_bytes(content)
    with pytest.raises(UserError, match=r"3\.png' cannot be read"):
        ImageSet.from_file(image_set[0], 4, 8)


def test_a_truncated_image_is_an_error_that_names_it(image_set, tmp_path):
    broken = tmp_path / "pictures/3.png"
    broken.write_bytes(broken.read_bytes()[:60])
    images = ImageSet.from_file(image_set[0], 4, 8)
    with pytest.raises(UserError, match=r"3\.png' is damaged"):
        images.load(images.prompts.rows)


def test_a_row_without_image_is_an_error(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}')
    with pytest.raises(UserError, match="'a' has no \"image\""):
        ImageSet.from_file(path, 4, 8)
