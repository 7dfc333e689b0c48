"""Seeds out of other numbers."""

__all__ = ["derive_seed"]


def derive_seed(*numbers: int) -> int:
    """A seed per tuple of whole numbers, in [0, 2^63): neighbouring tuples have nothing in common."""
    return hash(numbers) % 2**63  # a hash of whole numbers is the same in every process
