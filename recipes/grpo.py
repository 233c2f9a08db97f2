"""GRPO with QuRL on your own model and problems: `qurl train grpo model=DIR data=FILE`.

Requirements:

- `model`: a Hugging Face directory (Qwen2, Qwen2.5, Qwen3, Qwen3-MoE or Llama).
- `data`: a jsonl file with `question` and `answer` on each line, or any other format that
  `qurl_megatron/data/problems.py` reads.

The settings are those of the QuRL paper (Section 5) for DeepScaleR's first stage, with dual clip at
3, the default of verl, which the paper ran on. The recipe `deepscaler_grpo` has the later stages
too.
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
        objective=ObjectiveConfig(
            objective="acr", eps_low=0.2, eps_high=0.2, dual_clip=3.0, kl_coefficient=1e-3
        ),
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
