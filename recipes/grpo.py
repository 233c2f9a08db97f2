"""GRPO with QuRL on a model and problems of your own: `qurl train grpo model=DIR data=FILE`.

`model` is a Hugging Face directory (Qwen2/2.5, Qwen3, Llama), `data` a jsonl with `question` and
`answer` on each line, or any other file that `qurl_megatron/data` reads. The numbers are the
paper's for DeepScaleR's first stage, whose later ones `deepscaler_grpo` has.
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
        steps=800,
        learner=LearnerConfig(dtype="bfloat16", micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=1e-6, minibatches_per_step=2),
        objective=ObjectiveConfig(objective="acr", eps_low=0.2, eps_high=0.2, kl_coefficient=1e-3),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            prompts_per_step=256,
            completions_per_prompt=8,
            temperature=0.6,
            max_prompt_length=1024,
            max_response_length=8192,
        ),
        evaluation=EvaluationConfig(every_steps=50),
    )
