"""Recipes: each module has `recipe() -> Config`; one that makes its own model has `build_model`."""
