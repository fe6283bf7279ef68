"""What the processes of a run are, and what they tell each other."""
