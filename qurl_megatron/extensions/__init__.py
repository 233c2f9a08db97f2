"""What most runs do without: each folder can be deleted. `config/extensions.py` finds the rest."""
