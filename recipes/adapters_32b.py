"""A 32B model on one GPU of 80 GB: `qurl train adapters_32b model=DIR data=FILE`.

Adapters (LoRA) of rank 16 are trained over an INT4 base. Learner and server take turns on the GPU:
each holds the base in 19 GB. With the base in INT8, `quantization.format=int8`, less memory is
left, and a step is planned to take 1,900 s instead of 2,500: servers on a GPU are slower in INT4.
On two GPUs each side can have its own:

    qurl train adapters_32b model=DIR data=FILE quantization.format=int8 rollout.placement=separate

Requirements:

- `model`: Qwen2.5-32B or Qwen3-32B as a Hugging Face directory.
- `data`: a jsonl file with `question` and `answer` on each line.

Sources of the settings:

- The recipe `grpo`, with a quarter of its prompts.
- The learning rate is ten times that of `grpo`, as others found for LoRA; `quickstart_adapters`
  has seven times that of `quickstart`. Try more than one.
- The layout is one that `qurl plan` finds. It was never run on a GPU.
"""

from qurl_megatron.config.schema import (
    AdaptersConfig,
    Config,
    EvaluationConfig,
    LearnerConfig,
    QuantizationConfig,
    ServerConfig,
)
from qurl_megatron.recipes import grpo


def recipe() -> Config:
    config = grpo.recipe()
    config.adapters = AdaptersConfig(rank=16)
    config.quantization = QuantizationConfig(format="int4")
    config.optimizer.learning_rate = 1e-5
    config.learner = LearnerConfig(
        dtype="bfloat16", micro_batch_size=1, recompute="full", tokens_per_micro_batch=9216
    )
    config.rollout.prompts_per_step = 64
    config.rollout.placement = "colocated"
    # An evaluation server would hold the merged model in BF16, which is 64 GB.
    config.evaluation = EvaluationConfig(problems=0)
    config.rollout.server = ServerConfig(mem_fraction_static=0.8, max_running_requests=256)
    return config
