"""The whole loop on a laptop: a Qwen2 model of 1.3M parameters learns to spell words backward.

It needs no download and no GPU. The model starts from random weights. A short supervised warm-up
brings it to a fifth of the words or more, and QuRL improves it from there. Task and verifier are
reasoning-gym's `spell_backward` with words of five letters. Held-out words are never trained on.
"""

from pathlib import Path

from qurl_megatron.config.schema import (
    Config,
    EvaluationConfig,
    LearnerConfig,
    ObjectiveConfig,
    OptimizerConfig,
    QuantizationConfig,
    RolloutConfig,
    ServerConfig,
    UaqConfig,
    WarmupConfig,
)

# The fixed beginning of every question is one token; every other byte is a token of its own.
_TEMPLATE = "Spell this word backward (example: sun -> nus): "
DIMENSIONS = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def recipe() -> Config:
    from qurl_megatron import device

    server = ServerConfig(mem_fraction_static=0.3, max_running_requests=512, max_total_tokens=32768)
    return Config(
        model_builder="qurl_megatron.recipes.quickstart:build_model",
        data="reasoning_gym:spell_backward",
        data_options={"min_word_len": 5, "max_word_len": 5, "size": 10000},
        reward="reasoning_gym",
        steps=80,
        learner=LearnerConfig(
            # Two ranks, except on a single GPU: NCCL does not allow two ranks on one.
            data_parallel_size=1 if device.num_gpus() == 1 else 2,
            dtype="float32",
            micro_batch_size=128,
        ),
        optimizer=OptimizerConfig(
            learning_rate=1.5e-4, warmup_steps=20, beta2=0.99, minibatches_per_step=2
        ),
        objective=ObjectiveConfig(objective="acr"),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            # Without a GPU a server has one thread, so that two use both cores.
            servers=1 if device.num_gpus() else 2,
            prompts_per_step=64,
            completions_per_prompt=8,
            max_prompt_length=6,
            max_response_length=8,
            server=server,
        ),
        # Accuracy rises from 0 to two thirds within a dozen steps: check often, stop early.
        warmup=WarmupConfig(
            max_steps=300, target_accuracy=0.2, learning_rate=1.3e-3, check_every_steps=4
        ),
        evaluation=EvaluationConfig(problems=512, held_out_fraction=0.1, server=server),
    )


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
