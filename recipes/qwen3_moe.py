"""Mixtures of experts: Qwen3-30B-A3B, Qwen3-235B-A22B: `qurl launch qwen3_moe model=DIR data=FILE`.

Requirements:

- `model`: Qwen3-30B-A3B as a Hugging Face directory, or another that `Qwen3MoeForCausalLM` loads.
- `data`: a jsonl file with `question` and `answer` on each line.

`study` returns the configuration for a number of GPUs. `recipe` returns that for 16 GPUs, which
hold Qwen3-30B-A3B.

Sources of the settings:

- The recipe `grpo`, which has the paper's settings for DeepScaleR's first stage.
- Update-aware quantization (UAQ) with s = 2 and not the paper's 1.5: a router needs a power of two
  (`config.validate.check_scales`).
- The layouts are this project's own: the fastest that `qurl plan` finds for 16 and for 128 GPUs.
  They were never run on GPUs.
"""

import dataclasses

from qurl_megatron.config.schema import Config, LearnerConfig, UaqConfig
from qurl_megatron.recipes import scaling_32b

# Number of GPUs -> the learner's layout, and GPUs per server.
LAYOUTS = {
    16: (
        LearnerConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            data_parallel_size=2,
            expert_parallel_size=4,
        ),
        2,
    ),
    128: (
        LearnerConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=9,
            layers_in_last_pipeline_stage=6,  # of 94; the others have 11
            context_parallel_size=4,
            expert_parallel_size=8,
        ),
        8,
    ),
}


def recipe() -> Config:
    return study("", 16)


def study(model: str, gpus: int) -> Config:
    """Return the configuration for a model on a number of GPUs in `LAYOUTS`.

    `model` is a directory or a name in `model.known`.
    """
    layout, server = LAYOUTS[gpus]
    learner = dataclasses.replace(layout, tokens_per_micro_batch=9216, offload_optimizer=True)
    config = scaling_32b.with_servers(model, learner, gpus, server)
    config.quantization.uaq = UaqConfig(scale=2.0)
    return config
