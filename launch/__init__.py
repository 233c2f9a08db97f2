"""Launchers: they check a run, then start its servers and learner ranks."""
