"""The engine's loops: the hot path, and other changes to Lightning's loops; uses private names of Lightning 2.6."""
