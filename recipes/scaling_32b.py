"""32B on 16 to 256 H100s: `qurl train scaling_32b model=DIR data=FILE`.

`model` is Qwen2.5-32B or Qwen3-32B as a Hugging Face directory, `data` a jsonl with `question` and
`answer` on each line. `study` has a run for each model, number of GPUs and format; `recipe` is that
of 64 GPUs in INT8. From the QuRL paper, Section 5.1, DeepScaleR's first stage: 256 queries of 8
responses in 8k of context, 800 steps at 1e-6, temperature 0.6, a KL coefficient of 1e-3;
Section 5.2: s = 1.5. The paper trains nothing of this size: the layouts are this project's, within
a tenth of the shortest step that `qurl plan` finds; no GPU has confirmed them. On 16 and 32
activations are recomputed, without which 16 have no room for 8k.

Held-out accuracy takes a server of its own, in BF16; here none is started, and `qurl eval` measures
the checkpoints.
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
    ServerConfig,
    UaqConfig,
    WeightFormat,
)
from qurl_megatron.model.architecture import Architecture

# The published config.json of both; `qurl plan` takes their names for a model.
ARCHITECTURES = {
    "Qwen2.5-32B": Architecture(
        family="qwen2",
        num_layers=64,
        hidden_size=5120,
        intermediate_size=27648,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=152064,
        tie_word_embeddings=False,
        qkv_bias=True,
        qk_norm=False,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=131072,
        eos_token_ids=(151643,),
    ),
    "Qwen3-32B": Architecture(
        family="qwen3",
        num_layers=64,
        hidden_size=5120,
        intermediate_size=25600,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=40960,
        eos_token_ids=(151645, 151643),
    ),
}
FORMATS: tuple[WeightFormat, ...] = ("bf16", "int8", "fp8")
# GPUs -> tensor, pipeline and data parallel sizes, are activations recomputed, a server's GPUs.
# Five stages: twelve layers in the last, which has the output layer, and thirteen in the others.
LAYOUTS: dict[int, tuple[int, int, int, bool, int]] = {
    16: (2, 5, 1, True, 2),
    32: (2, 5, 2, True, 4),
    64: (8, 5, 1, False, 4),
    128: (8, 5, 2, False, 4),
    256: (8, 5, 4, False, 8),
}


def recipe() -> Config:
    return study("", 64, "int8")


def study(model: str, gpus: int, weight_format: WeightFormat) -> Config:
    """The run of `model`, a directory or a name in `ARCHITECTURES`, on a number of `LAYOUTS`."""
    tensor, pipeline, data, recompute, server = LAYOUTS[gpus]
    return Config(
        model=model,
        reward="math",
        steps=800,
        learner=LearnerConfig(
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            data_parallel_size=data,
            layers_in_last_pipeline_stage=12,
            micro_batch_size=1,
            recompute_activations=recompute,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-6, minibatches_per_step=2),
        objective=ObjectiveConfig(objective="acr", eps_low=0.2, eps_high=0.2, kl_coefficient=1e-3),
        quantization=QuantizationConfig(
            format=weight_format, uaq=UaqConfig(1.0 if weight_format == "bf16" else 1.5)
        ),
        rollout=RolloutConfig(
            prompts_per_step=256,
            completions_per_prompt=8,
            temperature=0.6,
            max_prompt_length=1024,
            max_response_length=8192,
            servers=(gpus - tensor * pipeline * data) // server,
            server=ServerConfig(tensor_parallel_size=server, max_running_requests=256),
        ),
        evaluation=EvaluationConfig(problems=0),
    )
