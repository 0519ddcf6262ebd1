"""The three batch sizes: how a step is split, stacked and drawn."""
