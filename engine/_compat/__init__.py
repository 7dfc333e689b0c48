"""All private names of Lightning and torch that the engine uses.

`lightning` and `torch` import the private classes and functions; `attributes` lists the private attributes that the
code reads or replaces on their objects. `tests/engine/compat` compares all three with the installed versions and with
the code: a release that moves a name fails there first.
"""
