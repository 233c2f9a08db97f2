"""What a run is made of, how it is changed and how it is checked."""
