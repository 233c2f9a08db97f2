"""Tokenizers of SentencePiece's files, which only models without a tokenizer.json need."""

from pathlib import Path
from typing import Any


def read_pieces(file: Path) -> Any:
    """Return a SentencePiece file as its library reads it; None: there is none, or another kind."""
    if not file.is_file():
        return None
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (OSError, RuntimeError):  # such as Llama 3's, which is tiktoken's
        return None


def byte_pairs(pieces: Any, *, follows_special: bool) -> Any:
    """Return SentencePiece's byte pairs as a tokenizer, such as a Llama's tokenizer.json has.

    transformers' own conversion merges in the order of ids in place of scores. `follows_special`:
    also the text behind a special token gets a space before it (`legacy` of tokenizer_config.json).
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import generate_merges

    names = [pieces.id_to_piece(number) for number in range(pieces.vocab_size())]
    is_other = (pieces.is_control, pieces.is_byte, pieces.is_unknown, pieces.is_unused)
    merged = {
        name: number
        for number, name in enumerate(names)
        if not any(each(number) for each in is_other)
    }
    scores = {name: pieces.get_score(number) for name, number in merged.items()}
    vocabulary = {name: number for number, name in enumerate(names)}
    unknown = names[pieces.unk_id()]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            generate_merges(merged, scores),
            unk_token=unknown,
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    if follows_special:
        spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [name for number, name in enumerate(names) if pieces.is_control(number)]
    )
    return tokenizer
