"""A tokenizer that can chat: ChatML, with tools and thoughts, in three templates."""

from pathlib import Path
from typing import Any

SPECIAL = [
    "<pad>",
    "<|im_end|>",
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]
VOCABULARY = len(SPECIAL) + 256 + 3

_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}
{% set content = m.content or "" -%}
{%- if m.role == "assistant" and DROPS and loop.index0 < ns.last -%}
{%- set content = content.split("</think>")[-1].lstrip("\\n") -%}
{%- endif -%}
{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
KEEPS_THOUGHTS = _TEMPLATE.replace("DROPS", "false")
DROPS_THOUGHTS = _TEMPLATE.replace("DROPS", "true")
# As Qwen3.5's: calls are written with tags, and a turn begins within a thought.
_PLAIN = """{{ content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}"""
_TAGS = """\
{%- if m.role == "assistant" and loop.index0 > ns.last -%}
{%- set thought, content = content.split("</think>") if "</think>" in content else ("", content) %}
{{- "<think>\\n" + thought.strip("\\n") + "\\n</think>\\n\\n" + content.lstrip("\\n") }}
{%- else %}{{ content }}{%- endif %}
{%- for call in m.tool_calls or [] -%}
{{ "\\n\\n" if content and loop.first }}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items -%}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
</function>
</tool_call>
{%- endfor -%}"""
assert _PLAIN in DROPS_THOUGHTS
BEGINS_THOUGHT = DROPS_THOUGHTS.replace(_PLAIN, _TAGS).replace(
    "prompt %}<|im_start|>assistant\n", "prompt %}<|im_start|>assistant\n<think>\n"
)


def chat_tokenizer(template: str = KEEPS_THOUGHTS, directory: Path | None = None) -> Any:
    """Return a tokenizer of bytes and a few pairs of them; also write it to a directory.

    Most text can therefore be written with other tokens than its encoding has.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("t", "h"), ("i", "s"), ("th", "e")]
    vocabulary = {word: index for index, word in enumerate([*words, *map("".join, merges)])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,  # type: ignore[arg-type]  # as the tokenizers library takes them
        eos_token="<|im_end|>",
        pad_token="<pad>",
        unk_token=None,  # type: ignore[arg-type]  # every byte has a token
    )
    marks = [AddedToken(word, normalized=False, special=word.startswith("<|")) for word in SPECIAL]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = template
    if directory:
        tokenizer.save_pretrained(directory)
    return tokenizer
