"""Small files of problems, a tokenizer with a token for each character, texts to score."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from qurl_megatron.algorithm.batch import Completion, Prompt
from qurl_megatron.algorithm.score import Score
from qurl_megatron.data.scoring import Scorer

GOOD = {"question": "1 + 1?", "answer": "2"}
CHAT = [{"role": "user", "content": "3 + 3?"}]
VERL = {
    "data_source": "math_dapo",
    "prompt": CHAT,
    "ability": "MATH",
    "reward_model": {"ground_truth": "6", "style": "rule"},
    "extra_info": {"index": "a"},
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each ASCII character and for each of three roles."""
    vocabulary = {chr(code): code for code in range(127)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0)))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()  # no spaces between the characters
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.add_tokens(["<system>", "<user>", "<assistant>"], special_tokens=True)
    tokenizer.chat_template = chat_template
    return tokenizer


def numbered(*numbers: int) -> list[dict[str, str]]:
    return [{"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in numbers]


def write_lines(path: Path, *lines: Any) -> str:
    """Write lines to a file, bytes unchanged and anything else as JSON; return its path."""
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return str(path)


def submit(
    scorer: Scorer, *texts: str, answer: str = "42", source: str = ""
) -> Future[list[Score]]:
    """Have completions to the question "How many?" of level 3 scored."""
    columns = {"data_source": source}
    prompt = Prompt("0", "How many?", answer, [10], {"level": 3}, columns=columns)
    return scorer.submit(prompt, [Completion([1], [0.0], text, False, [1]) for text in texts])
