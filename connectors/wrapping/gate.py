"""Who is kept out of a wrapped connector that would mix up what it stores.

Two requests with different ``cache_salt`` or LoRA adapters must never share KV. A connector
that does not tell them apart is not told of such a request at all: no hook, no step and no
end of it. The request runs as if there were no store. Not filtered, as rows of the running
batch cannot be: the keyword arguments of ``start_load_kv`` and attention metadata, from which
no store takes what to save.
"""

import copy
import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from connectors.wrapping.traits import Traits
from spm.metrics import Counters, Metric

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import (
        CachedRequestData,
        KVConnectorBlockState,
        SchedulerOutput,
    )
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class RequestGate:
    """Owned by the scheduler's thread. Remembers only requests that it keeps out."""

    def __init__(self, traits: Traits, connector_name: str, counters: Counters) -> None:
        self._traits = traits
        self._name = connector_name
        self._counters = counters
        self._kept: set[str] = set()
        """Kept out, and not over yet."""
        self._leaving: set[str] = set()
        """Over, and vLLM has not said so to the workers yet."""
        self._warned: set[str] = set()

    def admits(self, cache_salt: str | None, has_adapter: bool) -> bool:
        """Whether the wrapped connector keeps such a request's KV apart."""
        return self._objection(cache_salt, has_adapter) is None

    def _objection(self, cache_salt: str | None, has_adapter: bool) -> str | None:
        if cache_salt and not (self._traits.cache_salt and self._traits.salt_ok(cache_salt)):
            return "cache_salt"
        if has_adapter and not self._traits.adapters:
            return "adapter"
        return None

    def kept_out(self, request: "Request") -> bool:
        """Decided at the first question, by what does not change during a request's life."""
        if request.cache_salt is None and request.lora_request is None:
            return False
        if request.request_id in self._kept:
            return True
        why = self._objection(request.cache_salt, request.lora_request is not None)
        if why is None:
            return False
        self._kept.add(request.request_id)
        self._counters.add(Metric.BYPASSED_REQUESTS, label=why)
        if why not in self._warned:
            self._warned.add(why)
            logger.warning(
                "requests with %s are not looked up in %s and not saved by it: it may not keep "
                "their KV apart from others' (wrap.isolates_*; said once, all are counted)",
                {"cache_salt": "this cache_salt", "adapter": "a LoRA adapter"}[why],
                self._name,
            )
        return True

    def forget(self, request_id: str) -> None:
        """A request has finished; that the next step says so is still kept back."""
        if request_id in self._kept:
            self._kept.remove(request_id)
            self._leaving.add(request_id)

    @property
    def num_kept(self) -> int:
        """Requests remembered."""
        return len(self._kept) + len(self._leaving)

    def filtered(
        self, scheduler_output: "SchedulerOutput", ended: Sequence[str]
    ) -> "SchedulerOutput":
        """The step as the wrapped connector may see it, once a step: without the requests kept
        out, with ``ended`` among the finished. The very same object if nothing is different.

        Block ids to zero and blocks to copy are not told apart by request, and stay.
        """
        if not self._kept and not self._leaving and not ended:
            return scheduler_output
        finished = (scheduler_output.finished_req_ids - self._leaving) | set(ended)
        self._leaving.clear()
        seen = copy.copy(scheduler_output)
        seen.finished_req_ids = finished
        if self._kept:
            _hide(seen, self._kept)
        return seen


def _without(by_request: Mapping[str, _T], hidden: Collection[str]) -> dict[str, _T]:
    return {name: value for name, value in by_request.items() if name not in hidden}


def _hide(seen: "SchedulerOutput", hidden: set[str]) -> None:
    """Take requests out of a copy that is not shared with anybody."""
    seen.scheduled_new_reqs = [r for r in seen.scheduled_new_reqs if r.req_id not in hidden]
    seen.scheduled_cached_reqs = _cached_without(seen.scheduled_cached_reqs, hidden)
    seen.num_scheduled_tokens = _without(seen.num_scheduled_tokens, hidden)
    seen.total_num_scheduled_tokens = sum(seen.num_scheduled_tokens.values())
    seen.scheduled_spec_decode_tokens = _without(seen.scheduled_spec_decode_tokens, hidden)
    seen.scheduled_encoder_inputs = _without(seen.scheduled_encoder_inputs, hidden)
    if seen.preempted_req_ids is not None:
        seen.preempted_req_ids = seen.preempted_req_ids - hidden
    if seen.num_invalid_spec_tokens is not None:
        seen.num_invalid_spec_tokens = _without(seen.num_invalid_spec_tokens, hidden)
    if seen.kv_connector_block_state is not None:
        seen.kv_connector_block_state = _blocks_without(seen.kv_connector_block_state, hidden)


def _cached_without(cached: "CachedRequestData", hidden: set[str]) -> "CachedRequestData":
    """Lists by position; one that vLLM leaves empty (``new_token_ids``) stays empty."""
    if hidden.isdisjoint(cached.req_ids):
        return cached
    shown = [at for at, name in enumerate(cached.req_ids) if name not in hidden]

    def part(values: Sequence[_T]) -> list[_T]:
        return [values[at] for at in shown] if values else []

    return dataclasses.replace(
        cached,
        req_ids=part(cached.req_ids),
        resumed_req_ids=cached.resumed_req_ids - hidden,
        new_token_ids=part(cached.new_token_ids),
        all_token_ids=_without(cached.all_token_ids, hidden),
        new_block_ids=part(cached.new_block_ids),
        num_computed_tokens=part(cached.num_computed_tokens),
        num_output_tokens=part(cached.num_output_tokens),
    )


def _blocks_without(state: "KVConnectorBlockState", hidden: set[str]) -> "KVConnectorBlockState":
    return dataclasses.replace(
        state,
        req_ids=state.req_ids - hidden,
        boundary_state_offloads=_without(state.boundary_state_offloads, hidden),
    )
