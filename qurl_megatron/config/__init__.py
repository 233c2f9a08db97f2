"""The configuration of a run: its fields, overrides, checks and YAML."""
