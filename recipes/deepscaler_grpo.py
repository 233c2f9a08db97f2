"""GRPO on DeepScaleR with QuRL, in three stages of growing length.

    qurl train deepscaler_grpo model=DIR data=deepscaler.json \\
        evaluation.data.aime24=aime.json evaluation.data.math500=math.json [...]

`model` is DeepSeek-R1-Distill-Qwen-1.5B as a Hugging Face directory. `data` is the DeepScaleR
preview dataset, 40k problems with `problem` and `answer`: its `deepscaler.json`, the directory it
comes in, or a parquet. Files to evaluate on have the same fields; the paper's are AIME 2024, AMC
2023, MATH 500, Minerva and OlympiadBench, each a word `evaluation.data.NAME=FILE`.

From the QuRL paper, Section 5.1: 256 queries a step; 800 steps of 8 responses of 8k tokens, 400 of
16 of 16k, 400 of 16 of 24k; 1e-6; a KL of 1e-3 to the model as it was; temperature 0.6; Avg@32.
Section 5.2: s = 1.5. From DeepScaleR: two minibatches a step, top_p 0.95 in evaluation. The layout
is for a learner of 8 GPUs of 80 GB and was never run on any.

Weights, optimizer and place in the data go on from stage to stage, and so does the reference: it is
the model the run began with.

`quantization.format=fp8` and `=bf16` are the paper's other rollouts; BF16 goes without UAQ.
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
        reward="math",
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
