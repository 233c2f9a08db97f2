"""Tokenizers: their ids are those of tokenizer.json; the tokens that end an answer are found."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece as spm
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers import normalizers as norms
from tokenizers.processors import TemplateProcessing

from qurl_megatron.model.architecture import (
    SUPPORTED_ARCHITECTURES,
    Architecture,
    ArchitectureError,
)
from qurl_megatron.model.tokenizer import (
    SAMPLES,
    end_tokens,
    load_tokenizer,
    opens_turn,
    read_template,
    stop_token_ids,
    template_options,
    turn_end,
    what_differs,
    without_end,
)

SPECIAL = ["<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>"]
BOS, EOS, END = 0, 1, 2
VOCAB_SIZE = 600
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Splitting rules: one digit at a time as Qwen2's, three as Llama 3's, at capitals, and at nothing.
RULES = [r"\p{N}", r"\p{N}{1,3}", r"\p{Lu}?\p{Ll}+|\p{N}+", r"[^\s\S]"]


def byte_level(rule: str) -> Tokenizer:
    """Return a tokenizer of bytes that has learned digits, capitals and spaces to merge."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rule), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [(a, b) for a in "123450" for b in "123450"]
    merges += [("Ġ", "Ġ"), ("Ġ", "o"), ("l", "C"), ("lC", "a"), ("Ċ", "Ċ"), ("12", "34")]
    words += ["".join(merge) for merge in merges]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer.model = models.BPE(vocabulary, merges)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Return a tokenizer such as Llama 2's: a space before the text, bytes for what is unknown."""
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    words += [chr(code) for code in range(33, 127)] + ["▁▁", "▁t", "▁o"]
    merges = [("▁", "▁"), ("▁", "t"), ("▁", "o")]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = norms.Sequence([norms.Prepend("▁"), norms.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write(
    directory: Path, tokenizer: Tokenizer, name: str = "LlamaForCausalLM", **said: Any
) -> Path:
    """Write a tokenizer beside the config.json of a tiny model; return the directory."""
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **said}))
    family = SUPPORTED_ARCHITECTURES[name].family
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings"), 64)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    experts = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), 2)
    config = {"architectures": [name], "model_type": family, "vocab_size": VOCAB_SIZE}
    (directory / "config.json").write_text(json.dumps({**config, **sizes, **experts}))
    return directory


@pytest.mark.parametrize("name", SUPPORTED_ARCHITECTURES)
@pytest.mark.parametrize("declared", ["LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer"])
def test_ids_and_texts_are_those_of_the_file_whatever_class_is_declared(
    tmp_path: Path, name: str, declared: str
) -> None:
    for number, raw in enumerate([*map(byte_level, RULES), sentence_piece()]):
        directory = write(tmp_path / str(number), raw, name, tokenizer_class=declared)
        loaded = load_tokenizer(directory)
        for text in (*SAMPLES, "<|user|>of<|end|> it</s>"):
            ids = raw.encode(text, add_special_tokens=False).ids
            assert loaded.encode(text, add_special_tokens=False) == ids
            assert loaded.decode(ids) == raw.decode(ids, skip_special_tokens=False)
        assert loaded.bos_token_id == BOS and loaded.eos_token_id == EOS
        assert loaded.decode([EOS, 40], skip_special_tokens=True) == raw.decode([40])


def test_what_other_files_and_spaces_say_does_not_change_the_ids(tmp_path: Path) -> None:
    raw = byte_level(RULES[0])
    raw.enable_truncation(3)
    other = {"content": "<|user|>", "lstrip": True, "rstrip": True, "normalized": False}
    said: dict[str, Any] = {
        "added_tokens_decoder": {"3": {**other, "single_word": False, "special": True}}
    }
    directory = write(tmp_path, raw, **said, clean_up_tokenization_spaces=True)
    raw.no_truncation()
    loaded, text = load_tokenizer(directory), "so , is n't it ? <|user|> it"
    ids = raw.encode(text, add_special_tokens=False).ids
    assert len(ids) > 20 and loaded.encode(text, add_special_tokens=False) == ids
    assert loaded.decode(ids) == text


def test_it_is_said_if_transformers_would_load_another_tokenizer(tmp_path: Path) -> None:
    as_llama = load_tokenizer(write(tmp_path / "llama", byte_level(RULES[0])))
    assert "transformers' LlamaTokenizer would not read or write ' two  spaces" in what_differs(
        as_llama, []
    )
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    as_file = load_tokenizer(write(tmp_path / "file", byte_level(RULES[1]), **plain))
    assert what_differs(as_file, ["any text"]) == ""
    as_qwen = load_tokenizer(write(tmp_path / "qwen", byte_level(RULES[1]), "Qwen2ForCausalLM"))
    assert "transformers' Qwen2Tokenizer" in what_differs(as_qwen, [])


def test_without_a_tokenizer_json_a_class_that_loses_spaces_is_refused(tmp_path: Path) -> None:
    raw = byte_level(RULES[0])
    for name, declared in (("Qwen2ForCausalLM", "Qwen2Tokenizer"), ("LlamaForCausalLM", "")):
        directory = write(tmp_path / name, raw, name, tokenizer_class=declared or "LlamaTokenizer")
        raw.model.save(str(directory))  # vocab.json and merges.txt
        (directory / "tokenizer.json").unlink()
        if declared:
            assert (
                load_tokenizer(directory).decode(load_tokenizer(directory)("a b").input_ids)
                == "a b"
            )
            continue
        with pytest.raises(ArchitectureError, match="without a tokenizer.json transformers takes"):
            load_tokenizer(directory)


@pytest.mark.parametrize("joins_spaces", [False, True])
def test_a_sentencepiece_file_gives_its_own_ids_or_is_refused(
    tmp_path: Path, joins_spaces: bool
) -> None:
    directory = write(tmp_path, sentence_piece())
    (directory / "tokenizer.json").unlink()
    lines = (f"{n} clips, of which she sold {n * n} in {n % 12} months" for n in range(500))
    (directory / "text").write_text("\n".join(lines))
    spm.SentencePieceTrainer.train(
        input=str(directory / "text"),
        model_prefix=str(directory / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,  # as the others Llama 2's
        normalization_rule_name="identity",
        remove_extra_whitespaces=joins_spaces,
        minloglevel=2,
    )
    if joins_spaces:  # byte pairs alone do not
        with pytest.raises(ArchitectureError, match="other tokens for 'two␣␣spaces␣␣␣and"):
            load_tokenizer(directory)
        return
    file = spm.SentencePieceProcessor(str(directory / "tokenizer.model"))
    tokenizer = load_tokenizer(directory)
    for text in SAMPLES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == file.encode(text) and tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == file.bos_id() and tokenizer.eos_token_id == file.eos_id()
    settings = directory / "tokenizer_config.json"
    behind = {True: "▁5", False: "5"}  # a space behind a special token or none
    for legacy, piece in behind.items():
        said = {**json.loads(settings.read_text()), "legacy": legacy}
        settings.write_text(json.dumps(said))
        tokenizer = load_tokenizer(directory)
        ids = tokenizer.encode("</s>5", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == ["</s>", piece]
    settings.unlink()
    with pytest.raises(
        ArchitectureError, match="no tokenizer_config.json, which names special tokens"
    ):
        load_tokenizer(directory)


def stops(directory: Path) -> list[int]:
    return stop_token_ids(Architecture.from_directory(directory), load_tokenizer(directory))


def test_an_answer_ends_with_the_tokens_of_template_tokenizer_and_configs(tmp_path: Path) -> None:
    directory = write(tmp_path, byte_level(RULES[0]), chat_template=CHAT)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "eos_token_id": [7, EOS]}))
    (directory / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert stops(directory) == [END, EOS, 9, 7]
    write(tmp_path, byte_level(RULES[0]), eos_token=None)
    (directory / "generation_config.json").unlink()
    with pytest.raises(ArchitectureError, match="no token ends an answer"):
        stops(directory)


@pytest.mark.parametrize(
    ("template", "end", "opens"),
    [
        (CHAT, END, True),
        (CHAT.replace("<|end|>", " </s>"), EOS, True),  # as Llama 2's
        (CHAT.replace("<|end|>", "end"), None, True),  # text that is several tokens
        (CHAT.replace("<|end|>", ""), None, True),
        (CHAT.partition("{% if")[0], END, False),
        ("{% for m in messages %}{{ m.content }}</s>{% endfor %}", EOS, True),
        # It always opens a turn, and ends none.
        (CHAT.replace("<|end|>\n", "").replace("add_generation_prompt", "true"), None, True),
        ("{{ raise_exception('no answers') if messages | length > 1 }}", None, True),
        (None, None, None),
    ],
)
def test_the_end_of_a_turn_is_the_special_token_behind_an_assistants_content(
    tmp_path: Path, template: str | None, end: int | None, opens: bool | None
) -> None:
    tokenizer = load_tokenizer(write(tmp_path, byte_level(RULES[0]), chat_template=template))
    assert turn_end(tokenizer) == end
    if opens is not None:
        assert opens_turn(tokenizer) == opens


def test_a_prompt_has_one_beginning_and_no_end(tmp_path: Path) -> None:
    raw = byte_level(RULES[0])
    raw.post_processor = TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    tokenizer = load_tokenizer(write(tmp_path, raw))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer("<s>a").input_ids == [BOS, BOS, letter, EOS]
    assert without_end([BOS, BOS, letter, EOS, END], tokenizer, [EOS, END]) == [BOS, letter]
    assert without_end([EOS, letter], tokenizer, [EOS]) == [EOS, letter]
    assert without_end([EOS, EOS], tokenizer, [EOS]) == []
    assert end_tokens(tokenizer, [END, letter]) == {EOS, END}


def test_a_chat_template_is_chosen_by_name_or_file(tmp_path: Path) -> None:
    named = [{"name": name, "template": f"{name}: {CHAT}"} for name in ("plain", "tools")]
    directory = write(tmp_path / "model", byte_level(RULES[0]), chat_template=named)
    with pytest.raises(ArchitectureError, match="the default; give prompts.chat_template=plain or"):
        load_tokenizer(directory)
    (file := tmp_path / "own.jinja").write_text(f"own: {CHAT}")
    for given, begins in {"tools": "tools: ", str(file): "own: ", "{{ 1 }}": "1"}.items():
        tokenizer = load_tokenizer(directory, template=read_template(given, directory))
        text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert text.startswith(begins)
    assert read_template("", directory) == ""
    with pytest.raises(
        ArchitectureError, match="prompts.chat_template=x: no such file, .*has plain, tools"
    ):
        read_template("x", directory)
    other = write(tmp_path / "other", byte_level(RULES[0]))
    (other / "chat_template.json").write_text(json.dumps({"chat_template": CHAT}))
    assert load_tokenizer(other).chat_template == CHAT
    file.write_text("no template")
    with pytest.raises(ArchitectureError, match="own.jinja: no template of Jinja"):
        read_template(str(file), directory)
    file.write_text(broken := "\n{% for m in messages %}")
    for wrong, where in ((str(file), "own.jinja"), (broken, "{% for m in messages %}")):
        with pytest.raises(ArchitectureError, match=f"{where}: Jinja cannot read line 2 .Unex"):
            read_template(wrong, directory)


def test_a_chat_template_gets_its_options_and_one_day(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% if date is not defined %}{% set date = strftime_now('%d %b %Y') %}"
        "{% endif %}{{ date }}{% for m in messages %}{% set own = m.content %}{{ own }}"
        "{% if thinks is defined and thinks is false %}<no>{% endif %}{% endfor %}"
    )
    directory = write(tmp_path, byte_level(RULES[0]), chat_template=template)
    messages = [{"role": "user", "content": "Hi"}]

    def prompt(**options: Any) -> str:
        tokenizer = load_tokenizer(directory, options, "2024-02-29")
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    assert prompt() == "<s>29 Feb 2024Hi"
    assert prompt(thinks=False, date="today") == "<s>todayHi<no>"
    assert template_options(load_tokenizer(directory)) == {"thinks", "date"}
    with pytest.raises(ArchitectureError, match="has no such option; it has date, thinks"):
        prompt(thinking=False)
    with pytest.raises(ArchitectureError, match="messages=1: .* no such option"):
        prompt(messages=1)
    write(tmp_path, byte_level(RULES[0]))
    with pytest.raises(ArchitectureError, match="thinks=True: .* it has none"):
        prompt(thinks=True)
    write(tmp_path, byte_level(RULES[0]), chat_template="{% for m in messages %}{{ m.content }}")
    with pytest.raises(ArchitectureError, match="cannot be loaded .TemplateSyntaxError: .*endfor"):
        prompt()
