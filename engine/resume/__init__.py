"""Saving and resuming a run: loops, position in the data, random states, and which run is continued."""
