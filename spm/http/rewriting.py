"""What to do with the body of a generation request: pure, bytes in and a decision out."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spm.agent_hint import HintError, parse_agent_hint
from spm.config import SamConfig
from spm.hints import DEFAULT_TENANT
from spm.http.errors import RequestError
from spm.tenancy import tenant_salt
from tracker.ids import TenantId

HINT = "agent_hint"
CLAIM = "spm_tenant"
SALT = "cache_salt"
MANAGE_FIELD = f"{HINT}.context_management.manage_request"
_PARAMS = "kv_transfer_params"
_MARKS = tuple(f'"{key}"'.encode() for key in (HINT, CLAIM))
_VALID_SALT = re.compile(r"[^@/\\\0]{1,128}", re.DOTALL)
"""What vLLM 0.32 takes; anything else it refuses itself."""


@dataclass(frozen=True, slots=True)
class ManageRequest:
    """The request is no generation: ``hint`` is to be applied and answered for."""

    hint: Mapping[str, Any]
    model: str
    stream: bool
    include_usage: bool


def may_concern_us(body: bytes) -> bool:
    """Cheap and never wrong about a body that says our keys in plain letters."""
    return any(mark in body for mark in _MARKS)


def may_have_salt(body: bytes) -> bool:
    """Cheap and never wrong when it says no, however the key is written."""
    return b'"cache_salt"' in body or b"\\u" in body or b"\0" in body


def decide(
    body: bytes,
    sam: SamConfig,
    claim: Mapping[str, str] | None,
    tenant: TenantId = DEFAULT_TENANT,
) -> bytes | ManageRequest | None:
    """The body that goes on instead, the management request in it, or None: as it came.

    ``claim`` is that of ``tenant``, None for the default tenant. Raises :class:`RequestError`
    400 for a malformed hint. Whatever else is wrong with a body is left for vLLM to say.
    """
    document = _object(body)
    if document is None:
        return None
    hint = document.pop(HINT, None)
    if hint is not None:
        manage = _validated(hint, sam)
        if manage:
            return _manage_request(hint, document)
    params = document.get(_PARAMS)
    params = {} if params is None else params
    if not isinstance(params, dict):
        return None
    forged = params.pop(CLAIM, None)
    salted = sam.salts_tenants and _salted(document, tenant)
    if hint is None and claim is None and forged is None and not salted:
        return None
    if hint is not None:
        params[HINT] = hint
    if claim is not None:
        params[CLAIM] = dict(claim)
    if params or _PARAMS in document:
        document[_PARAMS] = params
    return _bytes(document)


def _salted(document: dict[str, Any], tenant: TenantId) -> bool:
    """Give the request its tenant's salt; False if it needs none, or vLLM refuses its own."""
    own = document.get(SALT)
    if own is None and tenant == DEFAULT_TENANT:
        return False
    if own is not None and not (isinstance(own, str) and _VALID_SALT.fullmatch(own)):
        return False
    document[SALT] = tenant_salt(tenant, own)
    return True


def resalted(body: bytes) -> bytes | None:
    """The body of a request that has no tenant of its own, its salts made the default tenant's
    wherever they are in it; None: as it came. Nobody can name another tenant's salt so."""
    document = _json(body)
    return _bytes(document) if _resalt(document) else None


def _resalt(part: Any) -> bool:  # noqa: ANN401
    """Without recursion: the client chooses the depth."""
    changed, pending = False, [part]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            changed = _salted(one, DEFAULT_TENANT) or changed
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
    return changed


def _object(body: bytes) -> dict[str, Any] | None:
    document = _json(body)
    return document if isinstance(document, dict) else None


def _json(body: bytes) -> Any:  # noqa: ANN401
    try:
        # As vLLM's web framework reads it: detects UTF-16, and the last of equal keys counts.
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _bytes(document: Any) -> bytes:  # noqa: ANN401
    try:
        # ASCII escapes carry lone surrogates, which UTF-8 cannot.
        return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    except RecursionError as error:
        raise RequestError(400, "the body is nested too deeply") from error


def _validated(hint: object, sam: SamConfig) -> bool:
    """Refuses what is malformed or switched off; True for a management request."""
    try:
        parsed = parse_agent_hint(hint, HINT)
    except HintError as error:
        raise RequestError(400, str(error), param=error.field) from error
    if not sam.ranges:
        refuse_ranges(hint, HINT)
    if parsed.manage_request and parsed.session_id is None:
        field = f"{HINT}.session_id"
        raise RequestError(400, f"{field} is missing: manage_request needs it", param=field)
    return parsed.manage_request


def refuse_ranges(hint: Any, path: str) -> None:  # noqa: ANN401
    """:class:`RequestError` 400 if the valid ``hint`` names a part of a session's blocks."""
    cache_control = hint.get("cache_control") or {}
    edits = (hint.get("context_management") or {}).get("edits") or ()
    places = [(cache_control, "block_offset", f"{path}.cache_control")]
    places += [
        (e, "block_start", f"{path}.context_management.edits[{n}]") for n, e in enumerate(edits)
    ]
    for fields, key, place in places:
        if fields.get(key) is not None:
            raise RequestError(
                400,
                f"{place}.{key}: hints about a part of a session are switched off here "
                "(sam.ranges=false); leave it out",
                param=f"{place}.{key}",
            )


def _manage_request(hint: dict[str, Any], document: dict[str, Any]) -> ManageRequest:
    model = document.get("model")
    options = document.get("stream_options")
    return ManageRequest(
        hint=hint,
        model=model if isinstance(model, str) else "",
        stream=document.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )
