"""What a message says of a field that does not exist: its name here, or the fields like it.

`OTHER_NAMES` has settings of TRL, verl, slime, NeMo-RL and prime-rl, by the last parts of their
paths: `lr` stands for verl's `actor.optim.lr` too. A text after a field says how its value differs.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

from qurl_megatron.config.older import MOVED

PARALLEL = "learner.tensor_parallel_size, of servers rollout.server.tensor_parallel_size"
PROMPTS = "rollout.prompts_per_step and rollout.completions_per_prompt"
LENGTH = "rollout.max_completion_length"
GPUS = "learner.tensor_parallel_size, learner.data_parallel_size and rollout.servers"
OTHER_NAMES = {
    # optimizer
    "lr": "optimizer.learning_rate, of a critic critic.optimizer.learning_rate",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "wd": "optimizer.weight_decay",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_decay_style": "optimizer.schedule",
    "min_lr": "optimizer.min_learning_rate",
    "min_lr_ratio": "optimizer.min_learning_rate, a rate",
    "warmup_ratio": "optimizer.warmup_steps, a number of steps",
    "max_grad_norm": "optimizer.clip_grad",
    "grad_clip": "optimizer.clip_grad",
    "ppo_mini_batch_size": "optimizer.minibatches_per_step, their number",
    "mini_batch_size": "optimizer.minibatches_per_step, their number",
    "train_global_batch_size": "optimizer.minibatches_per_step, their number",
    "global_batch_size": "optimizer.minibatches_per_step, their number",
    "num_iterations": "optimizer.minibatches_per_step: a step passes once over its samples",
    "ppo_epochs": "optimizer.minibatches_per_step: a step passes once over its samples",
    "num_steps_per_rollout": "optimizer.minibatches_per_step",
    # objective
    "beta": "objective.kl_coefficient",
    "kl_coef": "objective.kl_coefficient",
    "kl_loss_coef": "objective.kl_coefficient",
    "reference_policy_kl_penalty": "objective.kl_coefficient",
    "use_kl_loss": "objective.kl_coefficient, 0 for none",
    "clip_ratio": "objective.eps_low and objective.eps_high",
    "cliprange": "objective.eps_low and objective.eps_high",
    "clip_eps": "objective.eps_low and objective.eps_high",
    "eps_clip": "objective.eps_low and objective.eps_high",
    "epsilon": "objective.eps_low; optimizer.epsilon is that of Adam",
    "epsilon_low": "objective.eps_low",
    "clip_ratio_low": "objective.eps_low",
    "ratio_clip_min": "objective.eps_low",
    "epsilon_high": "objective.eps_high, of cispo the cap less 1",
    "clip_ratio_high": "objective.eps_high",
    "ratio_clip_max": "objective.eps_high",
    "eps_clip_high": "objective.eps_high",
    "entropy_coeff": "objective.entropy_coefficient",
    "entropy_coef": "objective.entropy_coefficient",
    "ent_coef": "objective.entropy_coefficient",
    "entropy_loss_coef": "objective.entropy_coefficient",
    "clip_ratio_c": "objective.dual_clip",
    "eps_clip_c": "objective.dual_clip",
    "delta": "objective.dual_clip",
    "loss_type": "objective.objective and objective.aggregation",
    "loss_mode": "objective.objective",
    "importance_sampling_level": "objective.objective=gspo",
    "sequence_level_importance_ratios": "objective.objective=gspo",
    "loss_agg_mode": "objective.aggregation",
    "token_level_loss": "objective.aggregation=token_mean",
    "tis_imp_ratio_cap": "objective.ratio_cap",
    "rollout_is_threshold": "objective.ratio_cap",
    "tis_clip": "objective.ratio_cap",
    "truncated_importance_sampling_ratio": "objective.ratio_cap",
    "rollout_is": "objective.objective, on_policy for none",
    "use_importance_sampling_correction": "objective.objective, on_policy for none",
    "use_tis": "objective.objective=tis",
    "vllm_importance_sampling_correction": "objective.objective, on_policy for none",
    "vllm_importance_sampling_mode": (
        "objective.objective: tis is token_truncate, sequence_tis is sequence_truncate, and masks "
        "have no name"
    ),
    "vllm_importance_sampling_cap": "objective.ratio_cap",
    "vllm_importance_sampling_clip_max": "objective.ratio_cap",
    "adv_estimator": "objective.advantage_estimator",
    "scale_rewards": "objective.advantage_estimator",
    "normalize_rewards": "objective.advantage_estimator",
    "norm_adv_by_std_in_grpo": "objective.advantage_estimator=dr_grpo",
    "use_leave_one_out_baseline": "objective.advantage_estimator=rloo",
    "gamma": "critic.discount",
    "lam": "critic.gae_lambda",
    "cliprange_value": "critic.value_clip",
    # rollout
    "mask_truncated_completions": "rollout.mask_truncated",
    "overlong_filtering": "rollout.mask_truncated",
    "overlong_filter": "rollout.mask_truncated",
    "apply_overlong_filtering": "rollout.mask_truncated",
    "online_difficulty_filtering": "rollout.dynamic_sampling_tries, or rollout.retire_after",
    "filter_groups": "rollout.dynamic_sampling_tries",
    "dynamic_sampling_filter_path": "rollout.dynamic_sampling_tries",
    "num_generations": "rollout.completions_per_prompt",
    "num_generations_per_prompt": "rollout.completions_per_prompt",
    "n_samples_per_prompt": "rollout.completions_per_prompt",
    "rollouts_per_example": "rollout.completions_per_prompt",
    "group_size": "rollout.completions_per_prompt; quantization.group_size is that of INT4",
    "n": "rollout.completions_per_prompt",
    "num_prompts_per_step": "rollout.prompts_per_step",
    "batch_size": PROMPTS,
    "train_batch_size": PROMPTS,
    "generation_batch_size": PROMPTS,
    "rollout_batch_size": PROMPTS,
    "per_device_train_batch_size": f"learner.micro_batch_size; a step has {PROMPTS}",
    "gradient_accumulation_steps": f"learner.micro_batch_size; a step has {PROMPTS}",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_size",
    "train_micro_batch_size": "learner.micro_batch_size",
    "max_new_tokens": LENGTH,
    "max_tokens": LENGTH,
    "rollout_max_response_len": LENGTH,
    "max_response_length": LENGTH,
    "max_seq_len": f"rollout.max_prompt_length and {LENGTH}",
    "max_model_len": f"rollout.max_prompt_length and {LENGTH}",
    "seq_len": f"rollout.max_prompt_length and {LENGTH}",
    "max_async_level": "rollout.max_staleness",
    "max_trajectory_age_steps": "rollout.max_staleness",
    "max_total_sequence_length": f"rollout.max_prompt_length and {LENGTH}",
    "gpu_memory_utilization": "rollout.server.mem_fraction_static",
    "vllm_gpu_memory_utilization": "rollout.server.mem_fraction_static",
    "sglang_mem_fraction_static": "rollout.server.mem_fraction_static",
    "max_num_seqs": "rollout.server.max_running_requests",
    "use_vllm": "rollout.servers, which are SGLang's",
    "vllm_mode": "rollout.placement",
    "colocate": "rollout.placement=colocated",
    "colocated": "rollout.placement=colocated",
    "multi_turn": "rollout.agent",
    "custom_generate_function_path": "rollout.agent",
    "overlong_buffer": "rollout.soft_overlong_tokens",
    "vllm_server_base_url": "rollout.servers_at",
    "rollout_num_gpus": GPUS,
    # learner
    "bf16": "learner.dtype; a quantization.format of bf16 leaves rollouts unquantized",
    "fp16": "learner.dtype, bfloat16 or float32",
    "precision": "learner.dtype",
    "torch_dtype": "learner.dtype",
    "tp": PARALLEL,
    "tensor_model_parallel_size": PARALLEL,
    "vllm_tensor_parallel_size": "rollout.server.tensor_parallel_size",
    "rollout_num_gpus_per_engine": "rollout.server.tensor_parallel_size",
    "pp": "learner.pipeline_parallel_size",
    "pipeline_model_parallel_size": "learner.pipeline_parallel_size",
    "dp": "learner.data_parallel_size",
    "cp": "learner.context_parallel_size",
    "ulysses_sequence_parallel_size": "learner.context_parallel_size",
    "ep": "learner.expert_parallel_size",
    "expert_model_parallel_size": "learner.expert_parallel_size",
    "ppo_max_token_len_per_gpu": "learner.tokens_per_micro_batch",
    "max_tokens_per_gpu": "learner.tokens_per_micro_batch",
    "use_dynamic_bsz": "learner.tokens_per_micro_batch",
    "use_dynamic_batch_size": "learner.tokens_per_micro_batch",
    "nnodes": GPUS,
    "num_nodes": GPUS,
    "n_gpus_per_node": GPUS,
    "gpus_per_node": GPUS,
    "actor_num_nodes": GPUS,
    "actor_num_gpus_per_node": GPUS,
    "fsdp": f"{GPUS}: the learner is Megatron-core's",
    "deepspeed": f"{GPUS}: the learner is Megatron-core's",
    "gradient_checkpointing": "learner.recompute",
    "enable_gradient_checkpointing": "learner.recompute",
    "activation_checkpointing": "learner.recompute",
    "optimizer_offload": "learner.offload_optimizer",
    "cpu_offload": "learner.offload_optimizer",
    # the run
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "max_num_epochs": "epochs",
    "num_epoch": "epochs",
    "max_steps": "steps",
    "max_num_steps": "steps",
    "total_training_steps": "steps",
    "num_rollout": "steps",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_period": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "max_actor_ckpt_to_keep": "checkpoint.keep_last",
    "eval_steps": "evaluation.every_steps",
    "test_freq": "evaluation.every_steps",
    "val_period": "evaluation.every_steps",
    "eval_interval": "evaluation.every_steps",
    "val_files": "evaluation.data",
    "eval_dataset": "evaluation.data",
    "eval_prompt_data": "evaluation.data",
    "n_samples_per_eval_prompt": "evaluation.k, of one file evaluation.k_of",
    "metric_for_best_model": "checkpoint.best_by, a name in evaluation.data",
    "metric_name": "checkpoint.best_by, a name in evaluation.data",
    "train_files": "data",
    "prompt_data": "data",
    "train_dataset": "data",
    "dataset": "data",
    "dataset_name": "data",
    "shuffle_dataset": "prompts.shuffle",
    "rollout_shuffle": "prompts.shuffle",
    "truncation": "prompts.overlong",
    "filter_overlong_prompts": "prompts.overlong",
    "prompt_key": "prompts.question_key",
    "input_key": "prompts.question_key",
    "output_key": "prompts.answer_key",
    "label_key": "prompts.answer_key",
    "chat_template_kwargs": "prompts.chat_template_options",
    "apply_chat_template_kwargs": "prompts.chat_template_options",
    "model_name_or_path": "model",
    "model_name": "model",
    "model_path": "model",
    "hf_checkpoint": "model",
    "reward_funcs": "reward",
    "reward_fn": "reward",
    "custom_reward_function": "reward",
    "rm_type": "reward",
    "custom_rm_path": "reward",
    "experiment_name": "name",
    "run_name": "name",
    "default_local_dir": "output_dir",
    "project_name": "wandb_project",
    "report_to": "wandb_project",
    "use_wandb": "wandb_project",
    "logger": "wandb_project",
    # adapters and quantization
    "lora": "adapters.rank",
    "lora_r": "adapters.rank",
    "lora_rank": "adapters.rank",
    "use_peft": "adapters.rank, 0 for none",
    "lora_alpha": "adapters.alpha",
    "lora_adapter_path": "adapters.init",
    "adapter_name_or_path": "adapters.init",
    "target_modules": "adapters.targets",
    "lora_target_modules": "adapters.targets",
    "quant": "quantization.format",
    "load_in_4bit": "quantization.format=int4 with adapters.rank",
    "load_in_8bit": "quantization.format=int8 with adapters.rank",
}


def our_name(path: str) -> str:
    """Return what a setting of 0.2 or of another framework is called here; empty: not known."""
    last = re.split(r"[./]", path)[-1].replace("-", "_").lower()
    return MOVED.get(path) or OTHER_NAMES.get(last, "")


def no_such_field(path: str, meanings: Mapping[str, str], of_run: Mapping[str, str]) -> str:
    """Return a line about a field that is not in `meanings`, with the closest of them.

    Args:
        path: the field's dotted path.
        meanings: the meaning of each field that there is, by dotted path.
        of_run: those of a run.
    """
    if inside := [name for name in meanings if name.startswith(f"{path}.")]:
        return f"{path}: has no value of its own; give its fields, such as {inside[0]}"
    section = path.rpartition(".")[0]
    closest = _closest(path, meanings)
    # A section of another framework may be a field here: `multi_turn.enable`, `model.path`.
    ours = our_name(path) or ("" if closest else our_name(section))
    if ours and of_run.keys() <= meanings.keys():
        return f"{path}: no such field; here it is {ours}"
    if path in of_run and any(name.startswith(f"{section}.") for name in meanings):
        return f"{path}: no such field; only a run has it"
    # "Eq. 5" does not end a sentence.
    close = [
        f"{name} ({re.split(r'(?<!Eq)[.] ', meanings[name])[0].removesuffix('.')})"
        for name in closest or _named(section.rpartition(".")[2], meanings)
    ]
    return f"{path}: no such field" + (f"; did you mean {' or '.join(close)}?" if close else "")


def _named(leaf: str, fields: Iterable[str]) -> list[str]:
    return [field for field in fields if field.rpartition(".")[2] == leaf]


def _closest(path: str, fields: Iterable[str]) -> list[str]:
    """Return the fields of the same name, else of the most similar name, else of a similar path.

    If `path` names a section, only its fields are searched for similar names.
    """
    section, _, leaf = path.rpartition(".")
    leaves = {field: field.rpartition(".")[2] for field in fields}
    if same := _named(leaf, fields):
        return same
    siblings = [field for field in leaves if field.rpartition(".")[0] == section] if section else []
    names = {leaves[field] for field in siblings or leaves}
    similar = difflib.get_close_matches(leaf, names, n=2, cutoff=0.7)
    return [field for field in siblings or leaves if leaves[field] in similar] or (
        difflib.get_close_matches(path, leaves, n=3, cutoff=0.6)
    )
