"""The precisions of the flag `precision`, the same under every strategy and on every device."""
