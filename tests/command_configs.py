"""The configurations of commands that take FIELD=VALUE, beside that of a run."""

from qurl_megatron.config.extensions import find
from qurl_megatron.evaluation.evaluate import EvalConfig

COMMAND_CONFIGS = {"eval": EvalConfig}
if elsewhere := find("elsewhere", "serve"):
    COMMAND_CONFIGS["serve"] = elsewhere.ServeConfig
