"""A small model and small data files for each recipe, as overrides of a command."""

import json
import pkgutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qurl_megatron import recipes
from qurl_megatron.launch.recipe import load_recipe
from qurl_megatron.model.architecture import Family
from tiny import build_tiny_model

RECIPES = [module.name for module in pkgutil.iter_modules(recipes.__path__)]
ROWS = 700  # more than any recipe takes in a step, with some held out
PROBLEM = {"question": "What is 2 + 2?", "answer": "4"}


def good_problems(count: int = ROWS) -> list[str]:
    return [json.dumps({**PROBLEM, "question": f"What is {n} + 2?"}) for n in range(count)]


def verl_row(n: int) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {n} + 2?"}],
        "reward_model": {"ground_truth": f"{n + 2}", "style": "rule"},
    }


def write_data(recipe: str, directory: Path) -> list[str]:
    """Write training and evaluation files in the recipe's format; return their overrides."""
    if recipe == "dapo_aime":
        for name, rows in {"train": range(ROWS), "test": range(ROWS, ROWS + 4)}.items():
            table = pa.Table.from_pylist([verl_row(n) for n in rows])
            pq.write_table(table, directory / f"{name}.parquet")
        files = ["train.parquet", "test.parquet"]
    elif recipe == "deepscaler_grpo":
        for name, rows in {"train": range(ROWS), "test": range(ROWS, ROWS + 4)}.items():
            problems = [{"problem": f"What is {n} + 2?", "answer": f"{n + 2}"} for n in rows]
            (directory / f"{name}.json").write_text(json.dumps(problems))
        files = ["train.json", "test.json"]
    elif recipe == "gsm8k_ppo":
        for name, rows in {"train": range(ROWS), "test": range(ROWS, ROWS + 4)}.items():
            problems = [
                {"question": f"What is {n} + 2?", "answer": f"{n} + 2 = {n + 2}\n#### {n + 2}"}
                for n in rows
            ]
            table = pa.Table.from_pylist(problems)
            (directory / "main").mkdir(exist_ok=True)
            pq.write_table(table, directory / "main" / f"{name}-00000-of-00001.parquet")
        files = ["main", "main:test"]
    elif recipe in ("adapters_32b", "grpo", "math_tools", "scaling_32b", "qwen3_5", "qwen3_moe"):
        (directory / "train.jsonl").write_text("\n".join(good_problems()))
        (directory / "test.jsonl").write_text(json.dumps({**PROBLEM, "question": "1 + 3?"}))
        files = ["train.jsonl", "test.jsonl"]
    else:
        raise AssertionError(f"add the files of recipe {recipe} here")
    return [f"data={directory / files[0]}", f"evaluation.data.test={directory / files[1]}"]


def write_inputs(recipe: str, directory: Path) -> list[str]:
    """Write a model and data for a recipe that builds none; return their overrides."""
    if recipe == "smollm2":  # with another model: its own is written in seconds, and large
        return [f"model={build_tiny_model(directory / 'model', 'llama')}"]
    config = load_recipe(recipe).config
    if config.model_builder:
        return []
    families: dict[str, Family] = {"qwen3_moe": "qwen3_moe", "qwen3_5": "qwen3_5_text"}
    # INT4's groups of 128 must be whole.
    widths = {"hidden_size": 128, "intermediate_size": 256} if recipe == "adapters_32b" else {}
    if recipe == "qwen3_5":
        widths = {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
    first_stages = config.learner.pipeline_parallel_size - 1
    last_layers = config.learner.layers_in_last_pipeline_stage or 4
    build_tiny_model(  # its layers and heads divide into the layouts
        directory / "model",
        families.get(recipe, "qwen2"),
        max_position_embeddings=32768,
        num_hidden_layers=4 * first_stages + last_layers,  # a hybrid repeats every four
        num_attention_heads=8,
        num_key_value_heads=8,
        **widths,
    )
    return [f"model={directory / 'model'}", *write_data(recipe, directory)]
