"""GRPO on DeepScaleR with QuRL, in three stages of growing completion length.

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

- The recipe `grpo`: all of the first stage.
- QuRL, Section 5.1: 800 steps of 8 completions of up to 8k tokens, 400 steps of 16 of up to 16k and
  400 steps of 16 of up to 24k; Avg@32 at temperature 0.6.
- DeepScaleR: a reward of 1 or 0 by the box after "</think>", and top_p 0.95 in evaluation.

Weights, optimizer and position in the data carry over from stage to stage. The KL reference stays
the model that the run started from.
"""

from qurl_megatron.config.schema import Config, EvaluationConfig, LearnerConfig, StageConfig
from qurl_megatron.recipes import grpo


def recipe() -> Config:
    config = grpo.recipe()
    config.reward = "deepscaler"
    config.steps = 1600
    config.learner = LearnerConfig(tensor_parallel_size=2, data_parallel_size=4, micro_batch_size=1)
    config.rollout.stages = {
        801: StageConfig(max_completion_length=16384, completions_per_prompt=16),
        1201: StageConfig(max_completion_length=24576, completions_per_prompt=16),
    }
    config.evaluation = EvaluationConfig(
        held_out_fraction=0.0, k=32, temperature=0.6, top_p=0.95, every_steps=100
    )
    return config
