"""`objective.objective=FILE.py:NAME`: an objective of the user's own."""
