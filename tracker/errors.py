"""Root of the project's one exception tree.

It lives in the lowest package so that every layer can raise from it; the rest of
the tree is in :mod:`spm.errors`.
"""


class SpmError(Exception):
    """Base of every error this project raises on purpose."""


class IntegrityError(SpmError):
    """Internal bookkeeping contradicts itself; raised only by ``check_integrity``."""
