"""DAPO on AIME 2024 with QuRL.

    qurl train dapo_aime model=DIR data=dapo-math-17k.parquet \\
        evaluation.data.aime24=aime-2024.parquet

`model` is Qwen2.5-7B-Math as a Hugging Face directory. `data` and the file to evaluate on are
DAPO's own parquet files, in verl's format: `prompt`, a list of chat messages, and
`reward_model.ground_truth`; their repeated rows count once.

From the QuRL paper, Section 5.1: 512 queries of 16 responses, 200 steps at 1e-6, clip at 0.2 and
0.28, no KL; Avg@1, and Avg@32 at temperature 1 and top_p 0.7. Section 5.2: s = 1.5. From DAPO: the
token mean, 16 minibatches a step, and the penalty over the last fifth of a response; of its dynamic
sampling the number of tries is bounded here.

`quantization.format=fp8` and `=bf16` give the paper's other two columns; BF16 goes without UAQ.
"""

from __future__ import annotations

from qurl_megatron.config.schema import (
    Config,
    EvaluationConfig,
    LearnerConfig,
    ObjectiveConfig,
    OptimizerConfig,
    QuantizationConfig,
    RolloutConfig,
    UaqConfig,
)


def recipe() -> Config:
    return Config(
        reward="math",
        steps=200,
        learner=LearnerConfig(tensor_parallel_size=4, data_parallel_size=2, micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=1e-6, minibatches_per_step=16),
        objective=ObjectiveConfig(
            objective="acr", eps_low=0.2, eps_high=0.28, aggregation="token_mean"
        ),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            prompts_per_step=512,
            completions_per_prompt=16,
            max_prompt_length=1024,
            max_response_length=3072,  # Qwen2.5-7B-Math has 4096 positions
            dynamic_sampling_tries=4,
            soft_overlong_tokens=614,
        ),
        evaluation=EvaluationConfig(
            held_out_fraction=0.0, k=32, temperature=1.0, top_p=0.7, every_steps=20
        ),
    )
