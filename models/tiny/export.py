"""Write a trained model as a Hugging Face checkpoint folder."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from loadtest import recall
from models.tiny.model import TinyQwen
from models.tiny.tokenizer import END, TURN_END, TURN_START

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role: ' + message.role) }}
    {%- endif %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type != 'text' %}
                {{- raise_exception('only text content is supported') }}
            {%- endif %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def export(model: TinyQwen, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights (bf16), configuration, tokenizer and chat template to folder; files already there are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    turn_end = tokenizer.token_to_id(TURN_END)
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the writer leaves it to its owner alone
    layers = range(model.config.num_hidden_layers)
    kinds = ["full_attention" if model.config.is_full_attention(layer) else "linear_attention" for layer in layers]
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        **model.config.to_hf(),
        "layer_types": kinds,
        "hidden_act": "silu",
        "attention_bias": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
        "eos_token_id": recall.END_TOKEN,
        "pad_token_id": recall.END_TOKEN,
        "bos_token_id": None,
    }
    _write_json(folder / "config.json", config)
    generation = {"eos_token_id": [recall.END_TOKEN, turn_end], "pad_token_id": recall.END_TOKEN, "do_sample": False}
    _write_json(folder / "generation_config.json", generation)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.max_position_embeddings,
        "eos_token": TURN_END,
        "pad_token": END,
        "additional_special_tokens": [TURN_START, TURN_END],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
