"""Data sets that ship, and what makes one; normexp/data.py has the names for one of your own."""
