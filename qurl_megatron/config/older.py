"""Fields of older versions: where they are now, and what is gone."""

from typing import Any

from qurl_megatron.config.schema import ConfigError

_SAME_NAME = (
    *("question_key", "answer_key", "incomplete", "ignore_media", "system_prompt", "shuffle"),
    *("chat_template", "chat_template_options", "template_date"),
)
# What version 0.2 had at the top. Words, files and saved configurations may have either name.
MOVED = {name: f"prompts.{name}" for name in _SAME_NAME} | {
    "data_options": "prompts.options",
    "data_weights": "prompts.weights",
    "overlong_prompts": "prompts.overlong",
    "reward_right": "scoring.right",
    "reward_wrong": "scoring.wrong",
    "reward_partial": "scoring.partial",
    "reward_weights": "scoring.weights",
    "source_rewards": "scoring.by_source",
    "reward_timeout_s": "scoring.timeout_s",
    "reward_import_timeout_s": "scoring.import_timeout_s",
    "scoring_workers": "scoring.workers",
    "advantage_estimator": "objective.advantage_estimator",
}
# What a saved configuration may have, each with what to do. Others that are unknown are ignored.
GONE = {
    "learner.fp8": "leave it out",
    "rollout.max_response_length": "it is rollout.max_completion_length",
    "rollout.top_k": "set rollout.top_p instead",  # -1 was none
}


def path_now(path: str) -> str:
    """Return the path of a field, or of a key of its dict, by that of any version."""
    name, dot, key = path.partition(".")
    return MOVED.get(name, name) + dot + key


def tree_now(tree: Any) -> Any:
    """Return what a saved configuration holds, with each field where it is now.

    Raises:
        ConfigError: a field is at both places, or one of `GONE` has a value.
    """
    if not isinstance(tree, dict):
        return tree
    for path, advice in GONE.items():
        section, _, name = path.partition(".")
        fields = tree.get(section)
        value = fields.get(name) if isinstance(fields, dict) else None
        if value not in (None, -1):
            raise ConfigError(f"{path}={value}: not supported any more; {advice}")
    for old, path in MOVED.items():
        section, _, name = path.partition(".")
        if old in tree and isinstance(fields := tree.setdefault(section, {}), dict):
            if name in fields:
                raise ConfigError(f"{old}: is {path} now, which is given too; leave one out")
            fields[name] = tree.pop(old)
    return tree
