"""Starts the processes of a run, and detects the launcher that started them."""
