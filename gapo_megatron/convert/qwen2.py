"""Qwen2 and Qwen2.5 (DeepSeek-R1-Distill-Qwen too): biases on query, key and value only."""

from __future__ import annotations

from typing import Any

from gapo_megatron.convert.rules import Geometry, Rule, fused_qkv, gated, output_layer, same


def rules(hf_config: Any) -> list[Rule]:
    """The table of `Qwen2ForCausalLM`."""
    g = Geometry.of(hf_config)
    mcore, hf, layers = "decoder.layers.{layer}", "model.layers.{layer}", g.num_layers
    q, k, v = (f"{hf}.self_attn.{x}_proj" for x in "qkv")
    qkv = f"{mcore}.self_attention.linear_qkv"
    fc1 = f"{mcore}.mlp.linear_fc1"
    # fmt: off
    return [
        same("embedding.word_embeddings.weight", "model.embed_tokens.weight", (g.vocab, g.hidden),
             tp_dim=0, vocab_padded=True),
        same(f"{mcore}.input_layernorm.weight", f"{hf}.input_layernorm.weight", (g.hidden,),
             num_layers=layers, te_name=f"{qkv}.layer_norm_weight"),
        fused_qkv(f"{qkv}.weight", (f"{q}.weight", f"{k}.weight", f"{v}.weight"), g,
                  num_layers=layers),
        fused_qkv(f"{qkv}.bias", (f"{q}.bias", f"{k}.bias", f"{v}.bias"), g, num_layers=layers),
        same(f"{mcore}.self_attention.linear_proj.weight", f"{hf}.self_attn.o_proj.weight",
             (g.hidden, g.heads * g.head_dim), tp_dim=1, num_layers=layers),
        same(f"{mcore}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight",
             (g.hidden,), num_layers=layers, te_name=f"{fc1}.layer_norm_weight"),
        gated(f"{fc1}.weight", (f"{hf}.mlp.gate_proj.weight", f"{hf}.mlp.up_proj.weight"),
              (g.intermediate, g.hidden), num_layers=layers),
        same(f"{mcore}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight",
             (g.hidden, g.intermediate), tp_dim=1, num_layers=layers),
        same("decoder.final_layernorm.weight", "model.norm.weight", (g.hidden,)),
        output_layer(g),
    ]
