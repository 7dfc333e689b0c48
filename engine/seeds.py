"""Derives seeds from other numbers."""

__all__ = ["derive_seed"]


def derive_seed(*numbers: int) -> int:
    """A seed for a tuple of whole numbers, in [0, 2^63): seeds of neighbouring tuples are unrelated."""
    return hash(numbers) % 2**63  # a hash of whole numbers is the same in every process
