"""Recipes: each module has `recipe() -> Config`, and `build_model` if it builds its own model."""
