"""PPO on GSM8K with QuRL.

    qurl train gsm8k_ppo model=DIR data=train.parquet evaluation.data.gsm8k=test.parquet

Requirements:

- `model`: Qwen2.5-0.5B-Instruct as a Hugging Face directory.
- `data`: verl's parquet files of GSM8K, whose questions ask for the answer after "####". Only that
  number is rewarded. GSM8K as the Hugging Face Hub has it, a directory with `train-*.parquet` and
  `test-*.parquet`, is read too; its questions do not ask for "####", so use it with
  `reward=gsm8k_flexible`, which looks at the last number.
- One GPU of 80 GB for the learner. It was never run on a GPU.

Sources of the settings:

- QuRL, Section 5.1: all 7.4k problems, 256 per step, 15 epochs of 29 steps, up to 512 tokens per
  completion, learning rate 1e-5, no update-aware quantization at this learning rate, greedy
  decoding on the test set.
- Flash-RL: ratio cap C = 2.
- verl's example of PPO on GSM8K: a reward of 1 or 0 by the strict rule, one completion per problem,
  four minibatches per step for policy and critic, critic learning rate 1e-5. verl's default: dual
  clip at 3.
"""

from qurl_megatron.config.schema import (
    Config,
    CriticConfig,
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
        reward="gsm8k",
        steps=435,
        learner=LearnerConfig(micro_batch_size=16),
        optimizer=OptimizerConfig(learning_rate=1e-5, minibatches_per_step=4),
        critic=CriticConfig(optimizer=OptimizerConfig(learning_rate=1e-5, minibatches_per_step=4)),
        objective=ObjectiveConfig(
            objective="acr",
            advantage_estimator="gae",
            eps_low=0.2,
            eps_high=0.2,
            ratio_cap=2.0,
            dual_clip=3.0,
            aggregation="token_mean",
        ),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.0)),
        rollout=RolloutConfig(
            prompts_per_step=256,
            completions_per_prompt=1,
            max_prompt_length=512,
            max_completion_length=512,
        ),
        evaluation=EvaluationConfig(held_out_fraction=0.0, every_steps=29),
    )
