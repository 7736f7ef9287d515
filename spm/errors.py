"""The exception tree, split by what the caller does next.

``ConfigError`` and ``LayoutError`` stop the engine at start, with words. ``StoreError``
means "treat the keys as missing and let the breaker decide when to ask again".
``BadValueError`` means "this one value is a miss".
"""

from tracker.errors import IntegrityError, SpmError

__all__ = [
    "BadValueError",
    "ConfigError",
    "ConnectorError",
    "IntegrityError",
    "LayoutError",
    "SpmError",
    "StoreError",
    "StoreRefusedError",
    "StoreTimeoutError",
    "StoreUnavailableError",
]


class ConfigError(SpmError):
    """A setting is unknown, of the wrong type or out of range."""


class LayoutError(SpmError):
    """The KV cache has a layout this connector cannot move safely."""


class ConnectorError(SpmError):
    """A wrapped connector raised in a hook that was called for a session."""


class StoreError(SpmError):
    """A store could not answer; nothing is known about the keys asked for."""


class StoreUnavailableError(StoreError):
    """No connection: refused, reset, authentication failed, or the server is loading."""


class StoreTimeoutError(StoreError):
    """The deadline passed before the store had answered."""


class StoreRefusedError(StoreError):
    """The store is there, and will not do what it was asked."""


class BadValueError(SpmError):
    """A stored value is truncated, corrupt or belongs to something else."""
