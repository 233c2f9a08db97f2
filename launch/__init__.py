"""Launchers: where a run's servers and learner ranks are started."""
