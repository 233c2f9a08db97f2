"""Launchers, which check a run and then start its servers and learner ranks."""
