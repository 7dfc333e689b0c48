"""Other people's models, tiny, under every strategy, against a plain loop: ``make zoo`` writes the results."""
