"""Makes the models of flowgrpo_judge_tiny.sh, random and tiny: `policy`, a diffusers QwenImagePipeline, and
`judge`, a Qwen3-VL. They are those of the tests.

    python examples/qwen_image/build_tiny.py FOLDER
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.utils import logging

from tests.models.pipeline_builder import tiny_pipeline_folder
from tests.models.vl_builder import build_tiny_qwen_vl

TERSENESS = 10.0


@torch.no_grad()
def make_terse(folder: Path) -> None:
    """Scale up what the judge thinks of a quotation mark, or it would hardly ever end the text it quotes."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder)
    mark = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids('"')
    model.lm_head.weight[mark] *= TERSENESS
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    logging.disable_progress_bar()
    tiny_pipeline_folder(folder / "policy")
    make_terse(build_tiny_qwen_vl(folder / "judge"))


if __name__ == "__main__":
    main()
