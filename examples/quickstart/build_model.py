"""Makes the quickstart's model: a tiny, genuine diffusers QwenImagePipeline folder.

    python examples/quickstart/build_model.py [--output examples/quickstart/model]

The text encoder and the image codec are trained here, on one CPU core in about three minutes, and stay frozen
later. The transformer is left at its initial weights.
"""

import argparse
import string
from pathlib import Path

import numpy as np
import torch
from data import supervised_strings
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from render import LENGTH, prompt, render
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from megatron_omni.models.qwen_image.pipeline import PROMPT_TEMPLATE, TEMPLATE_TOKENS, ImageCodec

LATENT_CHANNELS = 16
TEXT_WIDTH = 64
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def build_tokenizer() -> Qwen2Tokenizer:
    """Byte-level BPE in which each word of the template and the prompt is one token, and each capital too."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in words(PROMPT_TEMPLATE.format(prompt(""))):
        for end in range(2, len(word) + 1):
            pair, merged = (word[: end - 1], word[end - 1]), word[:end]
            if merged not in vocabulary:
                vocabulary[merged] = len(vocabulary)
                merges.append(pair)
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=SPECIAL_TOKENS)
    tokens = len(tokenizer(PROMPT_TEMPLATE.split("{}")[0]).input_ids)
    assert tokens == TEMPLATE_TOKENS, f"the template has {tokens} tokens before the prompt"
    return tokenizer


def words(text: str) -> list[str]:
    """The words of `text` without its special tokens, in byte-level spelling, with their leading space."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\n")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return sorted({word for word, _ in split})


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 2 * TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
        },
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def train_text_encoder(
    encoder: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, steps: int
) -> None:
    """Teaches the last hidden state of each quoted letter which letter it is and which place it has."""
    letters = string.ascii_uppercase
    texts = supervised_strings(8192)
    prompts = [PROMPT_TEMPLATE.format(prompt(text)) for text in texts]
    tokens = tokenizer(prompts, return_tensors="pt").input_ids
    target = torch.tensor([[letters.index(letter) for letter in text] for text in texts])
    first = TEMPLATE_TOKENS + len(tokenizer(prompt("")[:-1]).input_ids)
    head = nn.Linear(TEXT_WIDTH, len(letters) + LENGTH)
    optimizer = torch.optim.AdamW([*encoder.model.language_model.parameters(), *head.parameters()], lr=3e-3)
    place = torch.arange(LENGTH)
    for step in range(steps):
        batch = torch.randint(len(texts), (32,))
        hidden = encoder.model(input_ids=tokens[batch]).last_hidden_state[:, first : first + LENGTH]
        letter_logits, place_logits = head(hidden).split([len(letters), LENGTH], dim=-1)
        loss = nn.functional.cross_entropy(letter_logits.flatten(0, 1), target[batch].flatten())
        loss += nn.functional.cross_entropy(place_logits.flatten(0, 1), place.repeat(len(batch)))
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report("text encoder", step, steps, loss)


def build_codec() -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def train_codec(vae: AutoencoderKLQwenImage, steps: int) -> None:
    """Trains on rendered pictures, as still images, then sets the latents' mean and standard deviation."""
    codec = ImageCodec(vae)
    pictures = np.stack([render(text, seed) for seed, text in enumerate(supervised_strings(4096))])
    images = (torch.from_numpy(pictures).float() / 127.5 - 1).unsqueeze(1).expand(-1, 3, -1, -1)
    optimizer = torch.optim.AdamW(codec.parameters(), lr=4e-3, betas=(0.9, 0.99))
    for step in range(steps):
        batch = images[torch.randint(len(images), (4,))]
        latents = codec.encode(batch)
        noisy = latents + 0.1 * torch.randn_like(latents)
        loss = (codec.decode(noisy) - batch).square().mean() + 1e-3 * latents.square().mean()
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1, (step + 1) / 50) * min(1, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(codec.parameters(), 1.0)
        optimizer.step()
        report("image codec", step, steps, loss)
    write_back(codec, vae)
    with torch.no_grad():
        latents = codec.encode(images[:1024])
    vae.register_to_config(
        latents_mean=latents.mean((0, 2, 3)).tolist(), latents_std=latents.std((0, 2, 3)).tolist()
    )


@torch.no_grad()
def write_back(codec: ImageCodec, vae: AutoencoderKLQwenImage) -> None:
    """Puts the codec's weights into the video autoencoder, whose other temporal taps become zero."""
    trained = codec.state_dict()
    for name, parameter in vae.named_parameters():
        if parameter.dim() > trained[name].dim():
            parameter.zero_()[:, :, -1] = trained[name]
        else:
            parameter.copy_(trained[name])


def build_transformer() -> QwenImageTransformer2DModel:
    """A transformer whose blocks and output start as zero (AdaLN-Zero, https://arxiv.org/abs/2212.09748)."""
    model = QwenImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=24,
        num_attention_heads=4,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 8, 8),
    )
    gates = [layer for block in model.transformer_blocks for layer in (block.img_mod[1], block.txt_mod[1])]
    for layer in (*gates, model.norm_out.linear, model.proj_out):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def report(name: str, step: int, steps: int, loss: Tensor) -> None:
    if (step + 1) % 100 == 0:
        print(f"{name}: step {step + 1}/{steps}, loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model")
    output = parser.parse_args().output
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(tokenizer)
    train_text_encoder(text_encoder, tokenizer, steps=300)
    vae = build_codec()
    train_codec(vae, steps=1200)
    # Diffusers opens its parts in float32 whatever is stored; transformers would keep bfloat16.
    QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.bfloat16(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=build_transformer().bfloat16(),
    ).save_pretrained(output)


if __name__ == "__main__":
    main()
