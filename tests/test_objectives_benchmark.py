"""The runs of benchmarks/objectives.py are ones that `qurl train` accepts."""

from pathlib import Path

import pytest

from benchmarks.objectives import SETTINGS, overrides, recipe, rows_of_digits
from qurl_megatron.config.text import with_overrides
from qurl_megatron.config.validate import validate
from qurl_megatron.launch.prepare import prepare_new
from qurl_megatron.launch.recipe import load_recipe, run_function
from tiny import build_tiny_model


def test_a_row_continues_with_sums_of_two_digits_before() -> None:
    rows = list(rows_of_digits(64))
    assert len({row["question"] for row in rows}) == 10_000
    row = rows[1234]
    assert row["question"] == "1234"
    assert row["answer"].startswith("5704")  # 4 + 1, 5 + 2, 7 + 3, 0 + 4
    assert len(row["answer"]) == 64


@pytest.mark.usefixtures("short_quickstart")
@pytest.mark.parametrize("name", SETTINGS)
def test_every_arm_is_a_run_that_is_accepted(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    setting = SETTINGS[name]
    if setting.recipe == "smollm2":  # its own is large
        build_tiny_model(model, "llama")
    else:
        run_function(load_recipe(setting.recipe).config.model_builder, model, 0)
    recipe_name, *words = recipe(tmp_path, setting)
    words.append(f"model={model}")
    for arm in setting.arms:
        config = load_recipe(recipe_name).config
        validate(with_overrides(config, [*words, *overrides(setting, arm, seed=0)]))
    # Nothing is trained here, so the free disk does not matter.
    words += [*overrides(setting, arm, seed=0), "checkpoint.every_steps=0"]
    prepare_new(recipe_name, words, writes=False)  # also reads the data
