"""DAPO on AIME 2024 with QuRL.

    qurl train dapo_aime model=DIR data=dapo-math-17k.parquet \\
        evaluation.data.aime24=aime-2024.parquet

Requirements:

- `model`: Qwen2.5-7B-Math as a Hugging Face directory.
- `data` and the evaluation file: DAPO's own parquet files, in verl's format (`prompt`, a list of
  chat messages, and `reward_model.ground_truth`). Repeated rows count once.
- 8 GPUs for the learner (tensor-parallel 4, data-parallel 2) and GPUs for the servers. It was never
  run on GPUs.

Sources of the settings:

- QuRL, Section 5.1: 512 prompts of 16 completions, 200 steps, learning rate 1e-6, clipping at 0.2
  and 0.28, no KL penalty, Avg@1, and Avg@32 at temperature 1 and top_p 0.7.
- QuRL, Section 5.2: update-aware quantization (UAQ) with s = 1.5.
- DAPO: a reward of 1 or -1 by what follows "Answer:", the token mean, 16 minibatches per step, and
  the penalty over the last fifth of a completion. DAPO's dynamic sampling repeats until enough
  groups have mixed rewards; here it tries 4 times.
- verl's DAPO scripts, which the paper's framework has: dual clip at 10.
"""

from qurl_megatron.config.schema import (
    Config,
    EvaluationConfig,
    LearnerConfig,
    ObjectiveConfig,
    OptimizerConfig,
    QuantizationConfig,
    RolloutConfig,
    ScoringConfig,
    UaqConfig,
)


def recipe() -> Config:
    return Config(
        reward="dapo",
        scoring=ScoringConfig(wrong=-1.0),
        steps=200,
        learner=LearnerConfig(tensor_parallel_size=4, data_parallel_size=2, micro_batch_size=4),
        optimizer=OptimizerConfig(learning_rate=1e-6, minibatches_per_step=16),
        objective=ObjectiveConfig(
            objective="acr",
            eps_low=0.2,
            eps_high=0.28,
            dual_clip=10.0,
            aggregation="token_mean",
        ),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            prompts_per_step=512,
            completions_per_prompt=16,
            max_prompt_length=1024,
            max_completion_length=3072,  # Qwen2.5-7B-Math has 4096 positions
            dynamic_sampling_tries=4,
            soft_overlong_tokens=614,
        ),
        evaluation=EvaluationConfig(
            held_out_fraction=0.0, k=32, temperature=1.0, top_p=0.7, every_steps=20
        ),
    )
