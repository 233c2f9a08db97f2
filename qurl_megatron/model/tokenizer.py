"""A model's tokenizer, what its chat template writes, and the tokens that end an answer.

The ids are those of `tokenizer.json`. transformers builds the class that `tokenizer_config.json`
names, or for Qwen2 always the same one, from the vocabulary alone: its splitting rules are the
class's, not the file's. So nothing here asks for a class, unless there is no `tokenizer.json` and
no SentencePiece file (`tokenizer.model`), whose own ids then count.

Agents' processes load it too, so it imports no torch.
"""

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qurl_megatron.model.architecture import Architecture, ArchitectureError, read_json

# Texts that tokenizers of one vocabulary split in different ways if their rules differ.
SAMPLES = (
    " two  spaces   and a tab\there ",
    "lines\n\n\nof text\r\n  - indented\n",
    "1234567 + 0.125 = 50% of 2,000 #### 42",
    r"\frac{a_1}{b^{2}} \cdot \sqrt[3]{x} is $\boxed{42}$",
    "don't WE'RE camelCase snake_case def f(x):\n    return x[0]",
    "Ünïcode e\u0301 中文字 日本語 한국어 русский العربية हिन्दी 🙂 ½ ﬁ",
)
_QUESTION, _ANSWER = "a question", "an answer"
_ASKED = [{"role": "user", "content": _QUESTION}]
_ANSWERED = [*_ASKED, {"role": "assistant", "content": _ANSWER}]
# What transformers gives a template, besides the special tokens.
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
# Keep what the files say: no repair, no spaces taken out of decoded text, no code of the model.
_AS_IT_IS: dict[str, Any] = {
    "clean_up_tokenization_spaces": False,
    "fix_mistral_regex": False,
    "trust_remote_code": False,
}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def load_tokenizer(
    directory: Path, options: Mapping[str, Any] = _NOTHING, day: str = "", template: str = ""
) -> Any:
    """Return the tokenizer of a model directory.

    Args:
        template: the text of a chat template in place of its own.
        options: variables of its chat template, by name.
        day: the day that its chat template prints, as in 2026-11-26; empty: today.

    Raises:
        ArchitectureError: one line: it cannot be loaded, it has tokens that the model's embedding
            lacks, or its chat template does not use one of the `options`, or is one of several.
    """
    try:
        tokenizer = _loaded(directory)
        tokenizer.chat_template = template or tokenizer.chat_template or _of_processor(directory)
        token_ids = tokenizer("1")["input_ids"]
        largest = max(tokenizer.get_vocab().values(), default=0)
        known = template_options(tokenizer)  # also without options: it reads the template
    except Exception as error:  # transformers and its parsers raise any type for a broken file
        reason = " ".join(str(error).split())
        raise ArchitectureError(
            f"'{directory}': its tokenizer cannot be loaded ({type(error).__name__}: {reason:.200})"
        ) from None
    if not token_ids:
        raise ArchitectureError(f"'{directory}': its tokenizer turns the text '1' into no token")
    vocab_size = Architecture.from_directory(directory).vocab_size
    if largest >= vocab_size:
        raise ArchitectureError(
            f"'{directory}': its tokenizer has token {largest}, but the model's vocabulary has "
            f"{vocab_size} tokens, from 0; they do not belong together"
        )
    several = tokenizer.chat_template
    if isinstance(several, dict) and "default" not in several:
        raise ArchitectureError(
            f"'{directory}': it has several chat templates, and none is the default; give "
            f"prompts.chat_template={' or '.join(several)}"
        )
    unknown = [name for name in options if name not in known]
    if unknown:
        has = f"has {', '.join(sorted(known))}" if known else "has none"
        raise ArchitectureError(
            f"prompts.chat_template_options.{unknown[0]}={options[unknown[0]]!r:.80}: the chat "
            f"template of '{directory}' has no such option; it {has}"
        )
    now = date.fromisoformat(day) if day else date.today()
    tokenizer.apply_chat_template = functools.partial(
        tokenizer.apply_chat_template, strftime_now=now.strftime, **options
    )
    return tokenizer


def read_template(given: str, directory: Path) -> str:
    """Return the text of a chat template: of a file, of one of a model's by its name, or as given.

    Raises:
        ArchitectureError: there is no such file and no such name, or it is no template.
    """
    if not given:
        return ""
    if _has_jinja(given):
        return _parsed(given, f"{' '.join(given.split()):.80}")
    field = f"prompts.chat_template={given}"
    if Path(given).is_file():
        try:
            text = Path(given).read_text(encoding="utf-8")
        except ValueError as error:
            raise ArchitectureError(f"{field}: no text in UTF-8 ({error})") from None
        if Path(given).suffix == ".json" or not _has_jinja(text):
            raise ArchitectureError(f"{field}: no template of Jinja; give its text")
        return _parsed(text, given)
    try:
        named = _loaded(directory).chat_template
    except Exception:  # the model is wrong, which `load_tokenizer` says, or is not built yet
        named = None
    if isinstance(named, dict) and given in named:
        return str(named[given])
    has = f"; the model has {', '.join(named)}" if isinstance(named, dict) else ""
    raise ArchitectureError(f"{field}: no such file, nor a template's name{has}")


def _has_jinja(text: str) -> bool:
    return "{%" in text or "{{" in text


def _parsed(text: str, name: str) -> str:
    """Return the text of a template if Jinja reads it; messages have its file or its beginning."""
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise ArchitectureError(
            f"prompts.chat_template={name}: Jinja cannot read line {error.lineno} ({error.message})"
        ) from None
    return text


def _of_processor(directory: Path) -> Any:
    """Return the chat template that transformers gives only to processors; None: there is none."""
    file = directory / "chat_template.json"
    return read_json(file).get("chat_template") if file.is_file() else None


def _loaded(directory: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    if (directory / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(
            directory, added_tokens_decoder={}, **_AS_IT_IS
        )
    from qurl_megatron.model.sentence_pieces import byte_pairs, read_pieces

    if pieces := read_pieces(directory / "tokenizer.model"):
        file = directory / "tokenizer_config.json"
        if not file.is_file():
            raise ValueError(f"there is no {file.name}, which names special tokens; copy it too")
        settings = read_json(file)
        own = byte_pairs(pieces, follows_special=settings.get("legacy") is not False)
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            directory, tokenizer_object=own, **_AS_IT_IS
        )
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory, **_AS_IT_IS)
    # Some of transformers' classes normalize the last one's characters.
    for text in map(str.strip, SAMPLES if pieces else SAMPLES[:-1]):
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown = text[:30].replace(" ", "␣")
        if pieces and pieces.encode(text) != ids:
            raise ValueError(f"tokenizer.model has other tokens for {shown!r} than its byte pairs")
        if tokenizer.decode(ids).split() != text.split():
            raise ValueError(
                f"without a tokenizer.json transformers takes it for a {type(tokenizer).__name__}, "
                f"which does not give {shown!r} back"
            )
    return tokenizer


def template_options(tokenizer: Any) -> set[str]:
    """Return the names that a tokenizer's chat templates read and transformers does not give."""
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    templates = tokenizer.chat_template or {}
    read: set[str] = set()
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        tree = _compile_jinja_template(template).environment.parse(template)
        # A name that is set, perhaps in a loop only, is an option if it may have been given before.
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        own -= {
            test.node.name
            for test in tree.find_all(nodes.Test)
            if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
        }
        read |= meta.find_undeclared_variables(tree) - own
    return read - _GIVEN - set(tokenizer.special_tokens_map)


def turn_end(tokenizer: Any) -> int | None:
    """Return the special token with which the chat template ends an assistant's message.

    None: there is no template, or no special token follows the message's content.
    """
    before, after = _around_answer(tokenizer)
    token_ids = tokenizer.encode(after, add_special_tokens=False)
    if not token_ids or not _is_special(tokenizer, token_ids[0]):
        return None
    # A template may open the next turn unasked; it does so with what opened this one.
    opens = before.endswith(after) and token_ids[0] != tokenizer.eos_token_id
    return None if opens else int(token_ids[0])


def _is_special(tokenizer: Any, token: int) -> bool:
    added = tokenizer.added_tokens_decoder.get(token)
    return added is not None and added.special


@functools.cache
def _around_answer(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template writes before and after an assistant's content, stripped."""
    before, _, after = _rendered(tokenizer, _ANSWERED).rpartition(_ANSWER)
    return before.strip(), after.strip()


def _rendered(tokenizer: Any, messages: list[dict[str, str]], opens: bool = False) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
        ).strip()
    except Exception:  # there is no template, or it raises any type
        return ""


def stop_token_ids(architecture: Architecture, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer; the first is the one that ends an assistant's turn.

    Raises:
        ArchitectureError: there is none.
    """
    ends = (turn_end(tokenizer), tokenizer.eos_token_id, *architecture.eos_token_ids)
    ids = list(dict.fromkeys(end for end in ends if end is not None))
    if not ids:
        raise ArchitectureError(
            f"'{tokenizer.name_or_path}': no token ends an answer; config.json and "
            "generation_config.json have no eos_token_id, the tokenizer has no eos_token, and no "
            "chat template ends a turn with a token; give rollout.stop_token_ids"
        )
    return ids


def end_tokens(tokenizer: Any, stop_token_ids: Iterable[int]) -> set[int]:
    """Return the tokens that no prompt ends with: the tokenizer's end, and special stop tokens.

    Other stop tokens, such as a line break, may belong to a template.
    """
    return {token for token in stop_token_ids if _is_special(tokenizer, token)} | {
        tokenizer.eos_token_id
    }


def without_end(token_ids: list[int], tokenizer: Any, ends: Collection[int]) -> list[int]:
    """Return a prompt's tokens without `ends` behind them, and with one begin token at most."""
    last = len(token_ids)
    while last and token_ids[last - 1] in ends:
        last -= 1
    begin = tokenizer.bos_token_id
    first = 1 if begin is not None and token_ids[:2] == [begin, begin] else 0
    return token_ids[first:last]


def opens_turn(tokenizer: Any) -> bool:
    """Return whether the prompts of a chat template end where the assistant's content begins.

    True also if the template refuses to write an assistant's message.
    """
    before, _ = _around_answer(tokenizer)
    prompt = _rendered(tokenizer, _ASKED, opens=True)
    return prompt != _rendered(tokenizer, _ASKED) or before in ("", prompt)


@functools.cache
def turn_begin(tokenizer: Any) -> str:
    """Return what begins the policy's turn, a token of its own and a role; empty: only words."""
    prompt, asked = _rendered(tokenizer, _ASKED, opens=True), _rendered(tokenizer, _ASKED)
    begin = re.split(r"\n|<think>", prompt.removeprefix(asked).strip())[0]
    token_ids = tokenizer.encode(begin, add_special_tokens=False)
    return begin if token_ids and token_ids[0] in tokenizer.added_tokens_decoder else ""


def what_differs(tokenizer: Any, texts: Iterable[str]) -> str:
    """Return a line for the user if transformers loads a tokenizer with other ids for this model.

    Empty: that has the same ids for all `texts` and `SAMPLES`, and decodes them to the same.
    """
    from transformers import AutoTokenizer

    if not Path(tokenizer.name_or_path, "tokenizer.json").is_file():
        return ""  # it is the one that transformers chose
    try:
        other = AutoTokenizer.from_pretrained(tokenizer.name_or_path, **_AS_IT_IS)
    except Exception:  # it raises any type where it lacks a class
        return ""
    for text in (*SAMPLES, *texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        others = other.encode(text, add_special_tokens=False)
        if ids != others or other.decode(ids) != tokenizer.decode(ids):
            return (
                f"tokenizer: the ids of tokenizer.json; transformers' {type(other).__name__} "
                f"would not read or write {text[:30]!r} as it says"
            )
    return ""
