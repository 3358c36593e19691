"""A tiny random Qwen3-VL folder, such as `vllm serve` opens: what a judge is in a test."""

import json
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\
{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PATCH = 16


def build_tiny_qwen_vl(folder: Path, seed: int = 0) -> Path:
    """Writes it: byte-level tokens, two layers of width 64, heads of 32, the smallest on a CPU."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=SPECIAL + VISION,
        chat_template=CHAT,
    )
    tokenizer.save_pretrained(folder)
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [8, 4, 4],
                "rope_theta": 1e6,
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "lm_head" in name or "embed" in name else 0.1)
    model.save_pretrained(folder)
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 64**2, "longest_edge": 128**2},
        "processor_class": "Qwen3VLProcessor",
    }
    _write(
        folder / "preprocessor_config.json", common | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    )
    video_processor = common | {"video_processor_type": "Qwen3VLVideoProcessor"}
    _write(folder / "video_preprocessor_config.json", video_processor)
    return folder


def _write(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2))
