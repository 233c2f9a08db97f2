"""`qurl report`: an HTML page about a run, or several, with plots."""
