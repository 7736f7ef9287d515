"""What is known of a connector that may be wrapped: what it keeps apart, and what a lookup does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spm.wrap_config import Known, WrapConfig

_LONGEST_LMCACHE_SALT = 128
_NOT_IN_LMCACHE_SALTS = frozenset("@/\\\0")


def any_salt(cache_salt: str) -> bool:
    """A connector that keys by vLLM's block hash takes every salt."""
    return True


def lmcache_salt(cache_salt: str) -> bool:
    """Whether LMCache takes it into its keys; of others it raises."""
    return len(cache_salt) <= _LONGEST_LMCACHE_SALT and not _NOT_IN_LMCACHE_SALTS & set(cache_salt)


@dataclass(frozen=True, slots=True)
class Traits:
    """Of one connector, as read from its source. What is not known is ``False``."""

    cache_salt: bool
    """What it stores under two salts is told apart."""
    adapters: bool
    """What it stores for two LoRA adapters is told apart."""
    lookup_refreshes: bool
    """Being asked for a prefix keeps the prefix from being evicted."""
    salt_ok: Callable[[str], bool] = any_salt
    """Whether it can take this salt at all."""
    ends_free_offers: bool = False
    """What a lookup locked is free when the request ends. Of others it is known only that they
    free it when blocks are allocated for none of it."""
    lookups_pin: bool = False
    """What a lookup found stays pinned until the request's own step, which a stand-in has none
    of: nothing is asked on behalf of sessions."""


_UNKNOWN = Traits(cache_salt=False, adapters=False, lookup_refreshes=False)
_KNOWN: Mapping[str, Traits] = {
    # A lookup reads the tier's table; only a load or a store counts as use there.
    "OffloadingConnector": Traits(cache_salt=True, adapters=True, lookup_refreshes=False),
    # A lookup takes the blocks from the tier's free queue; given back, they are its newest.
    # And it warns of an allocation for nothing of what it has found.
    "SimpleCPUOffloadConnector": Traits(
        cache_salt=True, adapters=True, lookup_refreshes=True, ends_free_offers=True
    ),
    "LMCacheMPConnector": Traits(
        cache_salt=True, adapters=False, lookup_refreshes=True, salt_ok=lmcache_salt
    ),
    # Workers unpin for requests of the step only; else pins last for ``pin_timeout_sec``.
    "LMCacheConnectorV1": Traits(
        cache_salt=False, adapters=False, lookup_refreshes=False, lookups_pin=True
    ),
    "ExampleConnector": _UNKNOWN,
}
_KNOWN_MODULES = ("vllm.", "lmcache.")


def traits_of(wrap: WrapConfig) -> Traits:
    """Of the wrapped connector; settings that say yes or no win over what is known here."""
    known = _known(wrap.kv_connector, wrap.kv_connector_module_path, wrap.kv_connector_extra_config)
    return Traits(
        _decided(wrap.isolates_cache_salt, known.cache_salt),
        _decided(wrap.isolates_adapters, known.adapters),
        _decided(wrap.lookup_refreshes, known.lookup_refreshes),
        known.salt_ok,
        known.ends_free_offers,
        known.lookups_pin,
    )


def _decided(setting: Known, known: bool) -> bool:
    return known if setting == "auto" else setting == "yes"


def _known(name: str, module_path: str | None, extra: Mapping[str, Any]) -> Traits:
    if module_path and not module_path.startswith(_KNOWN_MODULES):
        return _UNKNOWN  # somebody else's, whatever its name is
    if name != "MultiConnector":
        return _KNOWN.get(name, _UNKNOWN)
    children = [_known_child(child) for child in extra.get("connectors", ())]
    if not children:
        return _UNKNOWN
    return Traits(
        all(child.cache_salt for child in children),
        all(child.adapters for child in children),
        all(child.lookup_refreshes for child in children),
        lambda salt: all(child.salt_ok(salt) for child in children),
        all(child.ends_free_offers for child in children),
        any(child.lookups_pin for child in children),
    )


def _known_child(child: Mapping[str, Any]) -> Traits:
    return _known(
        child.get("kv_connector", ""),
        child.get("kv_connector_module_path"),
        child.get("kv_connector_extra_config", {}),
    )
