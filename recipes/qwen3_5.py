"""Qwen3.5 and Qwen3.6 of 27B, with linear attention: `qurl launch qwen3_5 model=DIR data=FILE`.

Requirements:

- `model`: Qwen3.5-27B or Qwen3.6-27B as a Hugging Face directory, as it is published; its vision
  is left out.
- `data`: a jsonl file with `question` and `answer` on each line.

`study` returns the configuration for a number of GPUs. `recipe` returns that for 64 GPUs, on which
learner and servers have nodes of their own. On 16 GPUs they are colocated.

Sources of the settings:

- The recipe `grpo`, which has the paper's settings for DeepScaleR's first stage.
- Servers keep no cache of prefixes: with one, SGLang sets aside five states of 154 MB for each
  sequence instead of one. Each completion reads its prompt again.
- The layouts are this project's own. Their planned steps are within a twentieth of the shortest
  that `qurl plan` finds in the same placement; colocated, 64 GPUs are planned to be faster. They
  were never run on GPUs.
"""

import dataclasses

from qurl_megatron.config.schema import Config, LearnerConfig, UaqConfig
from qurl_megatron.recipes import scaling_32b

# Number of GPUs -> the learner's layout, and GPUs per server.
LAYOUTS = {
    16: (
        LearnerConfig(
            tensor_parallel_size=4,
            pipeline_parallel_size=2,
            data_parallel_size=2,
            offload_optimizer=True,
        ),
        4,
    ),
    64: (
        LearnerConfig(
            tensor_parallel_size=4,
            pipeline_parallel_size=5,
            layers_in_last_pipeline_stage=12,  # the others have 13
            data_parallel_size=2,
        ),
        4,
    ),
}


def recipe() -> Config:
    return study("", 64)


def study(model: str, gpus: int) -> Config:
    """Return the configuration for a model on a number of GPUs in `LAYOUTS`.

    `model` is a directory or a name in `model.known`.
    """
    layout, server = LAYOUTS[gpus]
    learner = dataclasses.replace(layout, tokens_per_micro_batch=9216)  # one longest sequence
    config = scaling_32b.with_servers(model, learner, gpus, server)
    config.rollout.server.options = {"disable_radix_cache": True}
    config.quantization.uaq = UaqConfig(scale=1.5)
    return config
