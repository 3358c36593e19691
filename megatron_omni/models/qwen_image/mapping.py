"""Tensors of `diffusers.QwenImageTransformer2DModel` and the Megatron parameters they correspond to."""

from megatron_omni.checkpoint.mapping import Kind, Row

HF_LAYER = "transformer_blocks.*."
LAYER = "layers.*."

MAPPING: tuple[Row, ...] = (
    Row(("img_in",), "img_in", Kind.REPLICATED),
    Row(("txt_norm",), "txt_norm", Kind.REPLICATED),
    Row(("txt_in",), "txt_in", Kind.REPLICATED),
    Row(("time_text_embed.timestep_embedder.linear_1",), "time_embedding.linear_1", Kind.REPLICATED),
    Row(("time_text_embed.timestep_embedder.linear_2",), "time_embedding.linear_2", Kind.REPLICATED),
    Row((HF_LAYER + "img_mod.1",), LAYER + "img_modulation.linear", Kind.COLUMN),
    Row((HF_LAYER + "txt_mod.1",), LAYER + "txt_modulation.linear", Kind.COLUMN),
    Row(
        (HF_LAYER + "attn.to_q", HF_LAYER + "attn.to_k", HF_LAYER + "attn.to_v"),
        LAYER + "attention.img.linear_qkv",
        Kind.QKV,
    ),
    Row(
        (HF_LAYER + "attn.add_q_proj", HF_LAYER + "attn.add_k_proj", HF_LAYER + "attn.add_v_proj"),
        LAYER + "attention.txt.linear_qkv",
        Kind.QKV,
    ),
    Row((HF_LAYER + "attn.norm_q",), LAYER + "attention.img.q_layernorm", Kind.REPLICATED),
    Row((HF_LAYER + "attn.norm_k",), LAYER + "attention.img.k_layernorm", Kind.REPLICATED),
    Row((HF_LAYER + "attn.norm_added_q",), LAYER + "attention.txt.q_layernorm", Kind.REPLICATED),
    Row((HF_LAYER + "attn.norm_added_k",), LAYER + "attention.txt.k_layernorm", Kind.REPLICATED),
    Row((HF_LAYER + "attn.to_out.0",), LAYER + "attention.img.linear_proj", Kind.ROW),
    Row((HF_LAYER + "attn.to_add_out",), LAYER + "attention.txt.linear_proj", Kind.ROW),
    Row((HF_LAYER + "img_mlp.net.0.proj",), LAYER + "img_mlp.linear_fc1", Kind.COLUMN),
    Row((HF_LAYER + "img_mlp.net.2",), LAYER + "img_mlp.linear_fc2", Kind.ROW),
    Row((HF_LAYER + "txt_mlp.net.0.proj",), LAYER + "txt_mlp.linear_fc1", Kind.COLUMN),
    Row((HF_LAYER + "txt_mlp.net.2",), LAYER + "txt_mlp.linear_fc2", Kind.ROW),
    Row(("norm_out.linear",), "final_modulation.linear", Kind.COLUMN),
    Row(("proj_out",), "proj_out", Kind.REPLICATED),
)
