"""Which fields of a run may change when it resumes."""

from qurl_megatron.config.schema import Config, ConfigError
from qurl_megatron.config.text import leaf_values

_SAVED_IN_WEIGHTS = "its weights depend on it"
_SETS_DATA_ORDER = "its position in the data depends on it"
# Prefixes of the fields that must not change when a run resumes, each with the reason.
_FIXED = {
    "model": _SAVED_IN_WEIGHTS,
    "learner.dtype": _SAVED_IN_WEIGHTS,
    "adapters": _SAVED_IN_WEIGHTS,
    "objective.advantage_estimator": "its checkpoints were made with or without a critic",
    "critic.model": _SAVED_IN_WEIGHTS,
    "quantization.uaq": _SAVED_IN_WEIGHTS,
    "data": _SETS_DATA_ORDER,
    "prompts": _SETS_DATA_ORDER,
    "rollout.max_prompt_length": _SETS_DATA_ORDER,  # longer ones are dropped
    "seed": _SETS_DATA_ORDER,
    "evaluation.held_out_fraction": _SETS_DATA_ORDER,
    "evaluation.problems": "its accuracies so far are over them",  # and 0 holds none out
    "evaluation.quantized": "its accuracies so far are of the other copy",
    "evaluation.data": _SETS_DATA_ORDER,  # training leaves out its questions
    "checkpoint.best_by": "its best checkpoint so far was chosen by it",
    "name": "is stored under it",
    "output_dir": "is stored there",
}


def validate_resume(saved: Config, config: Config) -> None:
    """Check that a run saved under `saved` can resume under `config`.

    Raises:
        ConfigError: a field was changed on which checkpoints or the position in the data depend.
    """
    before, after = leaf_values(saved), leaf_values(config)
    for each in (before, after):  # the order of patterns means nothing
        each["adapters.targets"] = sorted(each["adapters.targets"])
    del after["model_builder"]  # the run has its model, and each job a copy of the function
    fixed = dict(_FIXED)
    if "gae" not in (each.objective.advantage_estimator for each in (saved, config)):
        del fixed["objective.advantage_estimator"]
    if saved.adapters.rank:
        base = "its adapters were trained over a base in this format"
        fixed |= {"quantization.format": base, "quantization.group_size": base}
    if config.epochs:
        by = f"epochs={config.epochs:g} counts its steps by that (epochs=0 with steps=N does not)"
        fixed["rollout.prompts_per_step"] = by
    for field, value in after.items():
        reason = next((why for prefix, why in fixed.items() if field.startswith(prefix)), None)
        if reason and before[field] != value:
            own = "it empty" if before[field] in (None, "", [], {}) else before[field]
            own, value = (" ".join(f"{each}".split())[:200] for each in (own, value))
            raise ConfigError(f"{field}={value}: the run has {own}, and {reason}; start a new run")
