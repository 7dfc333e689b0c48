"""Precision by flag, the same under every strategy and on every device."""
