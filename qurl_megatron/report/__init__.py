"""What a run records, and the HTML page about it."""
