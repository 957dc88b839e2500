"""Small rewrites of published chat templates, with what matters in each, and folders with them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from tests.tokenizers import byte_level

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Family:
    """A family's template, and its tokens."""

    template: str
    ends: str
    """Token with which the template ends the model's turn, or begins what follows it."""
    eos: str
    """`eos_token` of its tokenizer."""
    special: tuple[str, ...] = ()
    """Other special tokens."""
    bos: str = ""

    @property
    def asks_date(self) -> bool:
        return "strftime_now" in self.template


def chat(
    begin: str,
    before: str,
    after: str,
    opening: str,
    last: str = "",
    **roles: tuple[str, str],
) -> str:
    """A template: `before`, the message and `after` for each, with ROLE; `roles` have their own.

    `last` is in place of `after` where the conversation ends with the model's turn.
    """
    turns = {role: (before.replace("ROLE", role), after.replace("ROLE", role)) for role in ROLES}
    return (
        f"{{%- set turns = {json.dumps(turns | roles, ensure_ascii=False)} -%}}{begin}"
        "{%- for m in messages -%}"
        "{{ turns[m.role][0] + m.content }}"
        f"{{% if loop.last and not add_generation_prompt and {json.dumps(last)} %}}"
        f"{{{{ {json.dumps(last)} }}}}{{% else %}}{{{{ turns[m.role][1] }}}}{{% endif %}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{ {json.dumps(opening)} }}}}{{%- endif -%}}"
    )


_CHATML = ("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n")
_LLAMA = ("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>")
_USER, _ANSWER, _END = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\uff5c>"
_DEEPSEEK: dict[str, tuple[str, str]] = {"user": (_USER, ""), "assistant": (_ANSWER, _END)}

FAMILIES = {
    "llama3": Family(
        chat(
            "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n"
            "{% if tools %}Environment: ipython\n{% endif %}"
            "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
            "{% endif %}Today Date: {{ date_string }}<|eot_id|>",
            *_LLAMA,
            _LLAMA[0].replace("ROLE", "assistant"),
            tool=(_LLAMA[0].replace("ROLE", "ipython"), _LLAMA[1]),
        ),
        "<|eot_id|>",
        "<|end_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
        "<|begin_of_text|>",
    ),
    "qwen2.5": Family(
        chat(
            "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n"
            "{% endif %}",
            *_CHATML,
        ),
        "<|im_end|>",
        "<|im_end|>",
        ("<|im_start|>", "<|endoftext|>"),
    ),
    "qwen3": Family(
        chat("", *_CHATML)
        + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
        "<think>\n\n</think>\n\n{% endif %}",
        "<|im_end|>",
        "<|im_end|>",
        ("<|im_start|>", "<|endoftext|>"),
    ),
    "r1_distill": Family(
        chat("{{ bos_token }}", "", "", f"{_ANSWER}<think>\n", **_DEEPSEEK),
        _END,
        _END,
        (_USER, _ANSWER),
        "<\uff5cbegin\uff5c>",
    ),
    "deepseek_v3": Family(
        chat("{{ bos_token }}", "", "", _ANSWER, **_DEEPSEEK),
        _END,
        _END,
        (_USER, _ANSWER),
        "<\uff5cbegin\uff5c>",
    ),
    "mistral": Family(
        chat(
            "{{ bos_token }}",
            "",
            "",
            "",
            user=("[INST] ", "[/INST]"),
            assistant=(" ", "</s>"),
        ),
        "</s>",
        "</s>",
        ("[INST]", "[/INST]"),
        "<s>",
    ),
    "gemma": Family(
        chat(
            "{{ bos_token }}",
            "<start_of_turn>ROLE\n",
            "<end_of_turn>\n",
            "<start_of_turn>model\n",
            assistant=("<start_of_turn>model\n", "<end_of_turn>\n"),
        ),
        "<end_of_turn>",
        "<eos>",
        ("<start_of_turn>",),
        "<bos>",
    ),
    "phi3": Family(
        chat("", "<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n"),
        "<|end|>",
        "<|endoftext|>",
        ("<|user|>", "<|assistant|>", "<|system|>"),
    ),
    "olmo2": Family(
        chat(
            "{{ bos_token }}",
            "<|ROLE|>\n",
            "\n",
            "<|assistant|>\n",
            assistant=("<|assistant|>\n", "<|endoftext|>\n"),
        ),
        "<|endoftext|>",
        "<|endoftext|>",
        bos="<|bos|>",
    ),
    "glm4.5": Family(
        chat("[gMASK]<sop>", "<|ROLE|>\n", "", "<|assistant|>", tool=("<|observation|>\n", "")),
        "<|user|>",
        "<|endoftext|>",
        ("<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>"),
    ),
    "gpt_oss": Family(
        chat(
            "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>",
            "<|start|>ROLE<|message|>",
            "<|end|>",
            "<|start|>assistant",
            assistant=("<|start|>assistant<|channel|>final<|message|>", "<|end|>"),
            last="<|return|>",
        ),
        "<|return|>",
        "<|return|>",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
    ),
    "seed_oss": Family(
        chat("", "<seed:bos>ROLE\n", "<seed:eos>", "<seed:bos>assistant\n"),
        "<seed:eos>",
        "<seed:eos>",
        bos="<seed:bos>",
    ),
}


def tokenizer_of(name: str) -> Any:
    """A small tokenizer with a family's tokens and template."""
    family = FAMILIES[name]
    special = [one for one in (family.ends, family.bos, *family.special) if one]
    tokenizer = copy.deepcopy(byte_level(*special, eos=family.eos))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    if family.bos:
        tokenizer.bos_token = family.bos
    tokenizer.chat_template = family.template
    return tokenizer


def put_family(folder: Path, name: str, **fields: Any) -> Path:
    """A model folder without weights; `fields` of config.json."""
    tokenizer = tokenizer_of(name)
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        **{"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, **fields},
    ).save_pretrained(folder)
    return folder
