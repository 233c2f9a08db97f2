"""GRPO with QuRL on your own model and problems: `qurl train grpo model=DIR data=FILE`.

Requirements:

- `model`: a Hugging Face directory (Qwen2, Qwen2.5, Qwen3, Qwen3-MoE or Llama).
- `data`: a jsonl file with `question` and `answer` on each line, or any other format that
  `qurl_megatron/data/problems.py` reads.

Sources of the settings, from which `deepscaler_grpo`, `scaling_32b` and `qwen3_moe` start:

- QuRL, Section 5.1, DeepScaleR's first stage: 256 prompts of 8 completions of up to 8k tokens, 800
  steps, learning rate 1e-6, temperature 0.6, KL coefficient 1e-3.
- QuRL, Section 5.2: update-aware quantization (UAQ) with s = 1.5.
- DeepScaleR: two minibatches per step.
- verl, which the paper ran on: dual clip at 3, its default.
"""

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
            max_completion_length=8192,
        ),
        evaluation=EvaluationConfig(every_steps=50),
    )
