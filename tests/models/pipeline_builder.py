"""A tiny random diffusers QwenImagePipeline folder."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

WIDTH = 16
CHANNELS = 4


def tiny_pipeline_folder(path: Path, seed: int = 0) -> Path:
    """Writes it: byte-level tokens, an encoder of width 16, a codec of 4 channels, Qwen's schedule."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            base_shift=0.5,
            max_shift=0.9,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 2, 4],
            num_res_blocks=1,
            latents_mean=[0.3, -0.2, 0.1, -0.5],
            latents_std=[0.7, 1.3, 2.0, 0.4],
        ),
        text_encoder=tiny_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
    ).save_pretrained(path)
    return path


def tiny_tokenizer() -> Qwen2Tokenizer:
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return Qwen2Tokenizer(
        vocab=vocabulary, merges=[], extra_special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )


def tiny_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": WIDTH,
                "intermediate_size": 2 * WIDTH,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
                "bos_token_id": None,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={
                "depth": 1,
                "hidden_size": WIDTH,
                "intermediate_size": WIDTH,
                "num_heads": 2,
                "out_hidden_size": WIDTH,
                "fullatt_block_indexes": [0],
            },
        )
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model
