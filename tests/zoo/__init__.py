"""Other people's models, tiny, under every strategy, against a plain loop: ``make zoo`` writes docs/models.md."""
