"""Lightning's loggers: a separate folder for each run, and one continuous curve over all starts of a run."""
