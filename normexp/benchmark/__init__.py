"""The frozen benchmark: its table of runs, the ranking and the claims that it decides."""
