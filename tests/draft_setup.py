"""A tiny EAGLE-3 draft for the models of tests/rollout_setup.py."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.rollout_setup import SIZES, VOCAB

HEAD_DIM = 64


def write_draft(folder: Path, **changes: Any) -> Path:
    """A folder with config.json, changed by `changes`, and random weights; returns it.

    Its hidden states come from the model's embedding and its first layer.
    """
    width, mlp = SIZES["hidden_size"], SIZES["intermediate_size"]
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "num_attention_heads": SIZES["num_attention_heads"],
        "num_key_value_heads": SIZES["num_key_value_heads"],
        "head_dim": HEAD_DIM,
        "intermediate_size": mlp,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": SIZES["max_position_embeddings"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [0, 1],
        "num_aux_hidden_states": 2,
    }
    queries, keys = (HEAD_DIM * SIZES[f"num_{name}_heads"] for name in ("attention", "key_value"))
    shapes = {
        "fc.weight": (width, 2 * width),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * width),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, queries),
        "midlayer.mlp.gate_proj.weight": (mlp, width),
        "midlayer.mlp.up_proj.weight": (mlp, width),
        "midlayer.mlp.down_proj.weight": (width, mlp),
        "lm_head.weight": (VOCAB, width),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    ones = ["norm.weight", *(f"midlayer.{name}.weight" for name in norms)]
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(*shape, generator=generator) * 0.1 for name, shape in shapes.items()
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields | changes))
    save_file(tensors | {name: torch.ones(width) for name in ones}, folder / "model.safetensors")
    return folder
