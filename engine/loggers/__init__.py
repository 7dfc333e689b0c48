"""Lightning's loggers: a folder of its own for each run, and one curve through all starts of a run."""
