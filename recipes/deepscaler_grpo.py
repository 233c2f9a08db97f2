"""GRPO on DeepScaleR with QuRL, in three stages of growing response length.

    qurl train deepscaler_grpo model=DIR data=deepscaler.json \\
        evaluation.data.aime24=aime.json evaluation.data.math500=math.json [...]

Requirements:

- `model`: DeepSeek-R1-Distill-Qwen-1.5B as a Hugging Face directory.
- `data`: the DeepScaleR preview dataset, 40k problems with `problem` and `answer`. Its
  `deepscaler.json`, the directory it comes in and a parquet file all work.
- Evaluation files with the same fields, each given as `evaluation.data.NAME=FILE`. The paper's are
  AIME 2024, AMC 2023, MATH 500, Minerva and OlympiadBench.
- 8 GPUs of 80 GB for the learner (tensor-parallel 2, data-parallel 4) and GPUs for the servers. It
  was never run on GPUs.

Sources of the settings:

- QuRL, Section 5.1: 256 prompts per step; 800 steps of 8 responses of up to 8k tokens, 400 steps of
  16 of up to 16k and 400 steps of 16 of up to 24k; learning rate 1e-6; KL coefficient 1e-3;
  temperature 0.6; Avg@32.
- QuRL, Section 5.2: update-aware quantization (UAQ) with s = 1.5.
- DeepScaleR: a reward of 1 or 0 by the box after "</think>", two minibatches per step, and top_p
  0.95 in evaluation.

Weights, optimizer and position in the data carry over from stage to stage. The KL reference stays
the model that the run started from.

`quantization.format=fp8` and `quantization.format=bf16` are the paper's other rollouts. BF16 runs
without UAQ.
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
    StageConfig,
    UaqConfig,
)


def recipe() -> Config:
    return Config(
        reward="deepscaler",
        steps=1600,
        learner=LearnerConfig(tensor_parallel_size=2, data_parallel_size=4, micro_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=1e-6, minibatches_per_step=2),
        objective=ObjectiveConfig(objective="acr", eps_low=0.2, eps_high=0.2, kl_coefficient=1e-3),
        quantization=QuantizationConfig(format="int8", uaq=UaqConfig(scale=1.5)),
        rollout=RolloutConfig(
            prompts_per_step=256,
            completions_per_prompt=8,
            temperature=0.6,
            max_prompt_length=1024,
            max_response_length=8192,
            stages={
                801: StageConfig(max_response_length=16384, completions_per_prompt=16),
                1201: StageConfig(max_response_length=24576, completions_per_prompt=16),
            },
        ),
        evaluation=EvaluationConfig(
            held_out_fraction=0.0, k=32, temperature=0.6, top_p=0.95, every_steps=100
        ),
    )
