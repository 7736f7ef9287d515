"""What could be broken, one small edit each, and the test that sees it.

``row`` is the kind of fault, as in :mod:`tests.test_faults_covered`. Every edit puts
back a mistake that somebody has shipped; none of them is found by a type checker.
"""

from dataclasses import dataclass

_SCHEDULER = "tests/connectors/scheduler"
_WORKER = "tests/connectors/worker"
_E2E = "tests/e2e"


@dataclass(frozen=True)
class Break:
    """``old`` occurs once in ``file``; with ``new`` in its place, ``test`` must fail."""

    row: str
    what: str
    """What is broken then."""
    file: str
    old: str
    new: str
    test: str
    """Node id: one test, or one case of it."""


BREAKS = (
    Break(
        "F1",
        "the record of a request that was aborted stays",
        "connectors/scheduler/pooling.py",
        "record = self._records.pop(request.request_id, None)",
        "record = self._records.get(request.request_id)",
        f"{_SCHEDULER}/test_failures_with_vllm_scheduler.py"
        "::test_an_abort_at_any_stage_leaves_nothing_behind",
    ),
    Break(
        "F2",
        "every allocation is taken to be for a load that was planned",
        "connectors/scheduler/pooling.py",
        "if external_tokens > 0 and record.hit is not None and record.job_id is None:",
        "assert external_tokens > 0 and record.hit is not None\n        if True:",
        f"{_E2E}/test_request_endings.py::test_preemption_in_a_tiny_pool_changes_no_token",
    ),
    Break(
        "F3",
        "a load that failed is an assertion in the worker",
        "connectors/session_aware.py",
        "return {block_id for result in results for block_id in result.failed_block_ids}",
        "assert not any(result.failed for result in results)\n        return set()",
        f"{_E2E}/test_stored_values.py::test_a_damaged_value_is_a_miss_and_is_replaced[truncated]",
    ),
    Break(
        "F4",
        "a full host tier is an index error",
        "connectors/worker/saver.py",
        "if buffer is None:\n                skipped.append(move.key)\n                continue",
        "if buffer is None:\n                raise IndexError(move.block_id)",
        f"{_WORKER}/test_saver.py::test_without_a_buffer_a_block_is_skipped_answered_and_counted",
    ),
    Break(
        "F5",
        "an answer is looked up among the requests of this step",
        "connectors/scheduler/load_tracker.py",
        "self._finish(result.job_id, job, records.get(job.request_id))",
        "self._finish(result.job_id, job, records[job.request_id])",
        f"{_E2E}/test_remote_faults.py::test_a_request_may_go_while_its_load_hangs",
    ),
    Break(
        "F6",
        "the store is waited for at the start",
        "connectors/stores/redis_connections.py",
        "self._idle.append(self._make())\n",
        "self._idle.append(self._make())\n            self._idle[0].connect()\n",
        f"{_E2E}/test_remote_faults.py::test_redis_that_was_never_there_is_used_once_it_comes",
    ),
    Break(
        "F7",
        "a lookup is waited for as long as it takes",
        "connectors/scheduler/matcher.py",
        "elif self._clock() < record.lookup.deadline_s:",
        "elif self._clock() < float('inf'):",
        f"{_SCHEDULER}/test_with_vllm_scheduler.py"
        "::test_a_lookup_without_an_answer_costs_its_deadline_and_no_more",
    ),
    Break(
        "F7",
        "what is computed faster than loaded is loaded all the same",
        "connectors/scheduler/matcher.py",
        "if usable and not self._may_be_slow(record, size_bytes, plan):",
        "if usable:",
        f"{_SCHEDULER}/test_matcher.py::test_what_is_computed_faster_than_loaded_is_not_loaded",
    ),
    Break(
        "F8",
        "a step without a forward pass starts no load",
        "connectors/worker/half.py",
        "for command in commands.loads:",
        "for command in commands.loads if commands.has_forward else []:",
        f"{_WORKER}/test_half.py::test_a_step_that_computes_nothing_still_loads",
    ),
    Break(
        "F8",
        "the same, and the load is called done",
        "connectors/worker/batch_reader.py",
        "self._mover.scatter(self._codec.layouts[group], group_places)",
        "del group_places",
        f"{_E2E}/test_isolation.py::test_two_cache_salts_never_share_a_stored_block",
    ),
    Break(
        "F9",
        "the layout is believed",
        "connectors/worker/layout_check.py",
        "        _round_trip(layout, views, mover)\n    finally:",
        "        pass\n    finally:",
        f"{_WORKER}/test_layout_check.py::test_a_layout_that_lies_is_caught_and_memory_is_put_back",
    ),
    Break(
        "F10",
        "an idle engine does not step for a prefetch",
        "connectors/scheduler/pooling.py",
        "            or self._prefetcher.busy\n",
        "",
        f"{_E2E}/test_prefetch.py::test_a_prefetched_session_is_a_gpu_hit_for_every_full_block",
    ),
    Break(
        "F11",
        "what MultiConnector gives to another child is taken to be ours",
        "connectors/scheduler/pooling.py",
        "if external_tokens > 0 and record.hit is not None and record.job_id is None:",
        "if record.hit is not None and record.job_id is None:",
        f"{_E2E}/test_multi_connector.py::test_many_sessions_at_once[ours-last]",
    ),
    Break(
        "F12",
        "the header does not say which block it is",
        "spm/value_format.py",
        '        "hash": bytes(identity.block_hash),\n',
        "",
        f"{_E2E}/test_stored_values.py"
        "::test_a_damaged_value_is_a_miss_and_is_replaced[other-blocks-value]",
    ),
    Break(
        "F12",
        "any hash will do for a shared store",
        "connectors/fingerprint.py",
        'if not algorithm.startswith("sha256"):',
        "if not algorithm:",
        "tests/connectors/test_fingerprint.py::test_other_hashes_are_refused_with_a_remote_store",
    ),
    Break(
        "F13",
        "what a lookup found is taken to be there",
        "connectors/worker/load_job.py",
        "                    if move.block_id != NO_BLOCK_ID:\n",
        "                    if outcome is not LoadFailure.MISSING:\n",
        f"{_E2E}/test_remote_faults.py"
        "::test_redis_killed_and_restarted_empty_is_filled_and_used_again",
    ),
    Break(
        "F14",
        "a load that has ended is kept",
        "connectors/scheduler/load_tracker.py",
        "del self._jobs[result.job_id]",
        "self._jobs[result.job_id] = job",
        f"{_SCHEDULER}/test_storm_with_vllm_scheduler.py"
        "::test_every_answer_is_right_and_nothing_is_left_over",
    ),
    Break(
        "F14",
        "a reference to what was read is kept",
        "connectors/worker/batch_reader.py",
        "                if hit is not None:\n                    hit.buffer.release()",
        "                del hit",
        f"{_E2E}/test_request_endings.py::test_a_response_says_where_its_prompt_came_from",
    ),
    Break(
        "F15",
        "a label may be anything",
        "spm/metrics.py",
        "assert label in metric.spec.values, f",
        "assert isinstance(label, str), f",
        "tests/spm/test_metrics.py::test_a_label_outside_the_set_is_a_programming_error",
    ),
    Break(
        "F16",
        "a hint acts after the blocks of its request were freed",
        "connectors/scheduler/sessions.py",
        "        if any(groups):\n            hit_blocks",
        "        if not any(groups):\n            hit_blocks",
        f"{_SCHEDULER}/test_hints_with_vllm_scheduler.py::test_protection_decides_who_stays",
    ),
    Break(
        "F17",
        "a block is there when one rank has it",
        "connectors/scheduler/lookup.py",
        "tuple(all(by_name[name] for name in names) for names in query.names)",
        "tuple(any(by_name[name] for name in names) for names in query.names)",
        f"{_SCHEDULER}/test_lookup.py::test_a_block_is_there_when_every_rank_has_it",
    ),
    Break(
        "F17",
        "a save has ended when one rank's has",
        "spm/residency.py",
        "            if mask == self._all_ranks:\n                self.confirm_remote((key,))",
        "            if mask:\n                self.confirm_remote((key,))",
        "tests/spm/test_residency.py::test_a_remote_block_counts_once_all_ranks_stored_it",
    ),
    Break(
        "F18",
        "a batch closes up over what is missing",
        "connectors/stores/redis.py",
        "            found[at] = self._read_value(parser, reads[at].size_bytes)",
        "            found[found.index(None)] = self._read_value(parser, reads[at].size_bytes)",
        "tests/connectors/stores/test_contract.py::test_holes_never_shift_positions",
    ),
    Break(
        "F18",
        "a load goes on behind a hole",
        "connectors/worker/batch_reader.py",
        "            if failure is not None or hit is None:\n                break",
        "            if hit is None:\n                continue",
        f"{_WORKER}/test_loader_faults.py::test_one_bad_value_costs_itself_and_what_follows_it",
    ),
    Break(
        "F19",
        "what the store refused is called stored",
        "connectors/worker/saver.py",
        "named = {name for (name, _), ok in zip(items, stored, strict=True) if ok}",
        "named = {name for name, _ in items}",
        f"{_WORKER}/test_saver.py::test_a_refused_value_is_answered_and_not_called_stored",
    ),
    Break(
        "F19",
        "a copy that never finished is stored",
        "connectors/worker/saver.py",
        "if v.buffer is not None and v.buffer.verified]",
        "if v.buffer is not None]",
        f"{_WORKER}/test_saver.py::test_a_copy_that_never_finished_is_stored_nowhere",
    ),
    Break(
        "F20",
        "vLLM hears of the last block that failed only, and computes from there",
        "connectors/worker/load_job.py",
        "result.failed_block_ids.append(move.block_id)",
        "result.failed_block_ids[:] = [move.block_id]",
        f"{_E2E}/test_stored_values.py"
        "::test_a_damaged_value_is_a_miss_and_is_replaced[bit-in-payload]",
    ),
    Break(
        "F21",
        "failures are collected and never told",
        "connectors/session_aware.py",
        "        self._results.extend(result for _, result in ended)\n",
        "",
        f"{_E2E}/test_stored_values.py::test_a_damaged_value_is_a_miss_and_is_replaced[noise]",
    ),
    Break(
        "F22",
        "the load of a request that was aborted is not answered",
        "connectors/worker/loader.py",
        "            job.cancel()\n            self._ended.put(job_id)",
        "            job.cancel()\n            del self._jobs[job_id]",
        f"{_E2E}/test_remote_faults.py::test_a_request_may_go_while_its_load_hangs",
    ),
    Break(
        "F23",
        "a block is saved whoever has it by now",
        "connectors/scheduler/save_planner.py",
        "if block is not None and block.block_hash != work.payload.published:",
        "if False:",
        f"{_SCHEDULER}/test_save_planner.py"
        "::test_a_block_that_changed_hands_before_hand_out_is_skipped_and_counted",
    ),
    Break(
        "F23",
        "a copy is made of what is in the block later",
        "connectors/worker/saver.py",
        "        self._copy_out(copied, key_space)\n",
        "        threading.Timer(0.05, self._copy_out, (copied, key_space)).start()\n",
        f"{_WORKER}/test_saver.py"
        "::test_what_is_stored_is_the_step_s_content_though_blocks_are_reused_at_once",
    ),
    Break(
        "F24",
        "blocks are copied out before the step has computed them",
        "connectors/session_aware.py",
        "self.worker_half.begin_step(connector_metadata)\n",
        "self.worker_half.begin_step(connector_metadata)\n            self.worker_half.save()\n",
        f"{_E2E}/test_isolation.py::test_two_cache_salts_never_share_a_stored_block",
    ),
    Break(
        "F25",
        "blocks that were allocated without external tokens are not accounted for",
        "connectors/scheduler/pooling.py",
        "if record is not None:\n                self._consider_saves(record, num_tokens)",
        "if record is not None and record.loaded:\n"
        "                self._consider_saves(record, num_tokens)",
        f"{_E2E}/test_multi_connector.py::test_many_sessions_at_once[ours-last]",
    ),
    Break(
        "F26",
        "a question to another connector's lookup is never ended",
        "connectors/wrapping/lookups.py",
        "            question.stand_in.finish()\n        if not question.withdrawn:",
        "            pass\n        if not question.withdrawn:",
        "tests/connectors/wrapping/test_lookups.py"
        "::test_a_stand_in_is_asked_and_ended_once_on_every_rank",
    ),
    Break(
        "F26",
        "it is ended twice",
        "connectors/wrapping/stand_in.py",
        "        if self.finished:\n            return False\n",
        "",
        "tests/connectors/wrapping/test_lookups.py::test_a_stand_in_ends_once_whoever_ends_it",
    ),
    Break(
        "F27",
        "the type of KV is not part of the name",
        "connectors/fingerprint.py",
        '            "dtype": str(model.dtype),\n            "quantization"',
        '            "quantization"',
        "tests/connectors/test_fingerprint.py"
        "::test_any_difference_in_the_configuration_keeps_engines_apart",
    ),
    Break(
        "F27",
        "names depend on the process",
        "connectors/fingerprint.py",
        '"quantization": str(model.quantization),',
        '"quantization": str(hash(str(model.dtype))),',
        f"{_E2E}/test_two_engines.py"
        "::test_a_session_goes_on_on_another_engine_and_outlives_its_first",
    ),
    Break(
        "F28",
        "an adapter is its name and path",
        "connectors/groups.py",
        "return [_salted(key, salt) for key in keys] if salt else keys",
        "return keys if salt else keys",
        f"{_E2E}/test_isolation.py::test_two_adapters_never_share_even_behind_one_name_and_path",
    ),
    Break(
        "F28",
        "a wrapped connector that knows no salt is given requests with one",
        "connectors/wrapping/gate.py",
        "        if why is None:\n            return False\n",
        "        if True:\n            return False\n",
        f"{_E2E}/test_wrap_example.py::test_requests_with_a_cache_salt_are_kept_out",
    ),
    Break(
        "F29",
        "what is in the GPU pool is fetched again",
        "connectors/scheduler/matcher.py",
        "first, stop = local // group.block_tokens, limit // group.block_tokens",
        "first, stop = 0, limit // group.block_tokens",
        f"{_SCHEDULER}/test_matcher.py::test_only_blocks_beyond_the_local_hit_are_asked_for",
    ),
    Break(
        "F30",
        "a prefetch that is done is not noticed",
        "connectors/scheduler/pooling.py",
        "        self._prefetcher.take_result(result, stale=stale)\n",
        "",
        f"{_E2E}/test_prefetch.py::test_a_prefetched_session_is_a_gpu_hit_for_every_full_block",
    ),
    Break(
        "F31",
        "any number of bytes may be on its way",
        "spm/work_in_flight.py",
        "return not in_flight_bytes or after_bytes <= limit_bytes",
        "return not in_flight_bytes or after_bytes <= limit_bytes * 10**6",
        f"{_SCHEDULER}/test_save_planner.py::test_bytes_in_flight_are_bounded_and_the_rest_waits",
    ),
    Break(
        "F32",
        "only the first group is loaded",
        "connectors/scheduler/load_tracker.py",
        "            for position, group in enumerate(self._geometry.groups)\n"
        "            for index, key in",
        "            for position, group in enumerate(self._geometry.groups[:1])\n"
        "            for index, key in",
        f"{_E2E}/test_sleep_and_reset.py"
        "::test_a_reset_while_loads_and_saves_are_on_their_way_changes_no_token[hybrid_stock-False]",
    ),
    Break(
        "F33",
        "what is protected is never taken",
        "spm/sam/free_queue.py",
        "return taken + self._pop_across(missing) if missing else taken",
        "return taken",
        "tests/spm/sam/test_soft_ttl.py::test_with_everything_protected_every_allocation_succeeds",
    ),
    Break(
        "F34",
        "a session is its id, whoever's it is",
        "spm/hints.py",
        "return SessionRef(tenant, parse_session_id(value))",
        "return SessionRef(DEFAULT_TENANT, parse_session_id(value))",
        "tests/spm/test_hints.py::test_a_proven_tenant_owns_the_session_and_its_parent",
    ),
    Break(
        "F34",
        "answers from before a reset are believed after it",
        "connectors/scheduler/pooling.py",
        "            record.lookup = None  # its answer is about keys of the old space\n",
        "",
        f"{_SCHEDULER}/test_with_vllm_scheduler.py"
        "::test_an_answer_from_before_a_reset_says_nothing_after_it",
    ),
    Break(
        "F34",
        "an engine's values have the same names before and after a reset",
        "connectors/scheduler/pooling.py",
        "        self._spaces.renew()\n",
        "",
        f"{_E2E}/test_request_endings.py"
        "::test_a_reset_with_the_connector_makes_stored_values_unreachable",
    ),
)
