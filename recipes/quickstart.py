"""The whole loop on a laptop: a Qwen2 model of 1.3M parameters learns to spell words backward.

It needs no download and no GPU. The model starts from random weights. First it is shown some right
answers, until a fifth of its own answers are right, and QuRL improves it from there. Task and
verifier are reasoning-gym's `spell_backward` with words of five letters. Held-out words are never
shown.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qurl_megatron.config.schema import (
    Config,
    ConfigError,
    EvaluationConfig,
    LearnerConfig,
    ObjectiveConfig,
    OptimizerConfig,
    PromptsConfig,
    QuantizationConfig,
    RolloutConfig,
    ServerConfig,
    UaqConfig,
)

if TYPE_CHECKING:
    from torch import Tensor

    from qurl_megatron.algorithm.batch import Prompt

# The fixed beginning of every question is one token; every other byte is a token of its own.
_TEMPLATE = "Spell this word backward (example: sun -> nus): "
DIMENSIONS = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# For `teach`. Accuracy rises from 0 to two thirds within a dozen steps.
MOST_STEPS, WARMUP_STEPS, TEST_EVERY_STEPS = 3000, 20, 4
TESTED_PROBLEMS = 256
IGNORED = -100  # label of a token without loss, in torch


def recipe() -> Config:
    from qurl_megatron import device

    server = ServerConfig(mem_fraction_static=0.3, max_running_requests=512, max_total_tokens=32768)
    return Config(
        model_builder="qurl_megatron.recipes.quickstart:build_taught_model",
        data="reasoning_gym:spell_backward",
        prompts=PromptsConfig(options={"min_word_len": 5, "max_word_len": 5, "size": 10000}),
        reward="reasoning_gym",
        steps=40,
        learner=LearnerConfig(
            # Two ranks, except on a single GPU: NCCL does not allow two ranks on one.
            data_parallel_size=1 if device.num_gpus() == 1 else 2,
            dtype="float32",
            micro_batch_size=128,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, warmup_steps=8, beta2=0.99, minibatches_per_step=2
        ),
        objective=ObjectiveConfig(objective="acr"),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            # Without a GPU a server has one thread, so that two use both cores.
            servers=1 if device.num_gpus() else 2,
            prompts_per_step=64,
            completions_per_prompt=8,
            max_prompt_length=6,
            max_completion_length=8,
            server=server,
        ),
        evaluation=EvaluationConfig(problems=512, held_out_fraction=0.1, server=server),
    )


def build_taught_model(directory: Path, seed: int) -> Callable[[Config], None]:
    """Write the model of `build_model`; return the function that shows it right answers."""
    build_model(directory, seed)
    return teach


def build_model(directory: Path, seed: int, **dimensions: int) -> None:
    """Write a randomly initialized Qwen2 and its tokenizer as a Hugging Face directory.

    `dimensions` override fields of its config.json.
    """
    write_model(directory, seed, "qwen2", **(DIMENSIONS | dimensions))


def write_model(directory: Path, seed: int, model_type: str, **fields: int | bool) -> None:
    """Write a randomly initialized model and a tokenizer for the quickstarts' questions.

    `fields` are those of its config.json.
    """
    import torch
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Tokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    special = ["<pad>", "<eos>"]
    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(special + byte_tokens)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token=None,  # type: ignore[arg-type]  # every byte has a token
    )
    tokenizer.add_tokens([AddedToken(_TEMPLATE, normalized=False)])
    tokenizer.save_pretrained(directory)

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        max_position_embeddings=2048,
        initializer_range=0.03,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **({"vocab_size": len(tokenizer), "tie_word_embeddings": True} | fields),
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def teach(
    config: Config,
    accuracy: float = 0.2,
    batch_size: int = 128,
    learning_rate: float = 1.3e-3,
) -> None:
    """Train the model of a run on right answers until it gives some of them itself.

    RL needs a few rewards to start from, and a model with random weights gets none. Nothing of the
    held-out problems is shown. A process of its own does it: the caller may have to fork, which a
    process with torch's threads cannot.

    Args:
        accuracy: fraction of right greedy answers, to problems that are not shown, at which it
            ends.
        batch_size: answers in a step, or all if there are fewer.

    Raises:
        ConfigError: it failed.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_teach, args=(config, accuracy, batch_size, learning_rate)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise ConfigError(f"model_builder={config.model_builder}: ended with {process.exitcode}")


def _teach(config: Config, accuracy: float, batch_size: int, learning_rate: float) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from qurl_megatron import device
    from qurl_megatron.data.prompts import load_prompts, set_aside
    from qurl_megatron.machine.processes import die_with_parent
    from qurl_megatron.model.tokenizer import load_tokenizer

    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the caller says that it was interrupted
    logging.disable_progress_bar()
    torch.manual_seed(config.seed)
    torch.set_num_threads(min(4, len(os.sched_getaffinity(0))))
    tokenizer = load_tokenizer(Path(config.model))
    prompts = load_prompts(config, tokenizer).train
    tested, shown = set_aside(prompts, min(TESTED_PROBLEMS, len(prompts) // 2))
    model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    model.to(device.device())
    module = sys.modules[type(model).__module__]
    if rule := getattr(module, "torch_chunk_gated_delta_rule", None):  # else pads to chunks of 64
        module.torch_chunk_gated_delta_rule = partial(rule, chunk_size=16)  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.99))

    def scores(prompts: list[Prompt]) -> tuple[Tensor, Tensor]:
        """Return the mean loss of answers' tokens, and which answers have only right tokens."""
        rows = []
        for prompt in prompts:
            answer = tokenizer.encode(prompt.answer, add_special_tokens=False)
            rows.append((prompt.token_ids, [*answer, *config.rollout.stop_token_ids[:1]]))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
        for number, (prompt_ids, answer_ids) in enumerate(rows):
            length = len(prompt_ids) + len(answer_ids)
            tokens[number, :length] = torch.tensor([*prompt_ids, *answer_ids])
            labels[number, len(prompt_ids) : length] = torch.tensor(answer_ids)
        # Attention is causal, so padding behind an answer changes nothing before it.
        logits = model(tokens.to(model.device)).logits[:, :-1]
        labels = labels[:, 1:].to(model.device)
        is_right = (logits.argmax(-1) == labels) | (labels == IGNORED)
        return cross_entropy(logits.flatten(0, 1), labels.flatten()), is_right.all(dim=-1)

    order = random.Random(config.seed)
    for step in range(1, MOST_STEPS + 1):
        loss, _ = scores(order.sample(shown, min(batch_size, len(shown))))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / WARMUP_STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % TEST_EVERY_STEPS == 0:
            with torch.no_grad():
                right = float(scores(tested)[1].float().mean())
            print(f"shown answers, step {step}: loss {loss:.3f}, {right:.1%} right", flush=True)
            if right >= accuracy:
                break
    model.save_pretrained(config.model)
