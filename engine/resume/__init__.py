"""Saving and resuming a run: loops, place in the data, random states, and the run that is continued."""
