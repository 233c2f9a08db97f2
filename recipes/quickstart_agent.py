"""An agent on a laptop: a Qwen2 of 1.3M parameters learns to guess a letter in three turns.

The secret is one of five letters. `<` or `>` answers a wrong guess: the secret is before or after
it in the alphabet. An agent that halves the range always wins. One that begins at an end of the
range and reads the answers misses one letter, and wins four fifths of the games. One that does not
read them wins three fifths at best. Model and machine are those of `quickstart`. No answers are
shown first: a guess is right by chance often enough.
"""

import zlib
from typing import Any

from qurl_megatron.config.schema import (
    Config,
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

LETTERS = "abcde"
TURNS = 3


def recipe() -> Config:
    from qurl_megatron import device

    server = ServerConfig(mem_fraction_static=0.3, max_running_requests=512, max_total_tokens=32768)
    return Config(
        model_builder="qurl_megatron.recipes.quickstart:build_model",
        data="reasoning_gym:spell_backward",  # its words number the games
        prompts=PromptsConfig(options={"min_word_len": 5, "max_word_len": 5, "size": 10000}),
        steps=60,
        learner=LearnerConfig(
            # Two ranks, except on a single GPU: NCCL does not allow two ranks on one.
            tensor_parallel_size=1 if device.num_gpus() == 1 else 2,
            dtype="float32",
            micro_batch_size=128,
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, warmup_steps=5, beta2=0.99, minibatches_per_step=2
        ),
        objective=ObjectiveConfig(objective="acr"),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            prompts_per_step=64,
            completions_per_prompt=8,
            max_prompt_length=6,
            max_completion_length=1,
            server=server,
            agent=f"{__name__}:guess",
            max_turns=TURNS,
            max_episode_tokens=16,
        ),
        evaluation=EvaluationConfig(problems=512, held_out_fraction=0.1, server=server),
    )


async def guess(policy: Any, problem: Any) -> dict[str, float]:
    """Play one game."""
    secret = LETTERS[zlib.crc32(problem.question.encode()) % len(LETTERS)]
    policy.begin(policy.encode("?"))
    for number in range(TURNS):
        turn = await policy.generate()
        if turn.text == secret:
            return {"reward": 1.0, "accuracy": 1.0, "guesses": number + 1}
        is_letter = len(turn.text) == 1 and turn.text in LETTERS
        answer = "!" if not is_letter else "<" if secret < turn.text else ">"
        policy.observe(policy.encode(answer))
    return {"reward": 0.0, "accuracy": 0.0, "guesses": TURNS}
