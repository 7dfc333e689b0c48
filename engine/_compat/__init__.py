"""Private names of Lightning and torch that the engine stands on: all of them, here and nowhere else.

`lightning` and `torch` have the classes and functions that are imported, `attributes` the private attributes that are
read or replaced on their objects. `tests/engine/compat` compares all three with the installed versions and with the
code: a release that moves one of them fails there first.
"""
