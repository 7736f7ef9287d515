"""Whether loading from the remote store beats computing, request by request.

Scheduler thread only. Everything it knows is measured; what is not measured yet is tried.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from connectors.metadata import LoadFailure, LoadResult
from connectors.scheduler.load_estimate import LoadEstimate
from spm.config import SpmConfig
from spm.keys import Rank
from spm.residency import Tier

logger = logging.getLogger(__name__)

MARGIN_S = 0.005
"""A load may be estimated to take so much longer than computing: less is noise."""
SHORTEST_PATIENCE_S = 0.25
"""No load is given up earlier, however quickly its tokens are computed."""
_NEWEST = 0.5
"""Weight of the newest slower lookup in the estimate."""
_MAX_DOUBLINGS = 32
_SILENCE_S = 300.0
"""That the store is slow is not said again before."""


@dataclass(frozen=True, slots=True)
class _Load:
    """In flight."""

    size_bytes: int
    batches: int
    patience_s: float


class ReloadChoice:
    """Estimates from the slowest rank, the loads ahead, and the tokens ahead.

    While hits are skipped nothing is measured, so that now and then one request is sent to
    try (:meth:`grant_trial`); what it measures counts at once. One that measures nothing,
    because nothing of its prompt is stored, is no trial: another is sent soon.
    """

    def __init__(
        self,
        config: SpmConfig,
        compute_s: Callable[[int], float | None],
        clock: Callable[[], float],
    ) -> None:
        """``compute_s``: seconds until so many more tokens would be computed; None: unknown."""
        assert config.remote is not None
        breaker = config.remote.breaker
        self._first_pause_s, self._longest_pause_s = breaker.backoff_s, breaker.backoff_cap_s
        self._longest_load_s = config.load_deadline_s
        self._longest_lookup_s = config.lookup_deadline_s
        self._batch_bytes, self._threads = config.batch_bytes, config.load_threads
        self._compute_s = compute_s
        self._clock = clock
        self._ranks: dict[Rank, LoadEstimate] = {}
        self._lookup_s = 0.0
        self._loading: dict[int, _Load] = {}
        self._ahead_bytes = self._ahead_batches = 0
        self._skipped: tuple[int, int, bool] | None = None
        """Bytes and tokens of the hit skipped last, and whether the store was to be asked
        about it; None: none is skipped now."""
        self._trials = 0
        self._next_trial_s = 0.0
        self._trial: tuple[int, bool] | None = None
        """Tokens of the hit that was sent to try and has measured nothing yet, and whether the
        store was to be asked about it; None: none was."""
        self._said = False
        """Whether the log says that it is slow."""
        self._silent_until_s = -math.inf

    @property
    def skips(self) -> bool:
        """Whether hits are being skipped; to be told and logged."""
        return self._skipped is not None

    # --- deciding -------------------------------------------------------------------------

    def may_be_slow(self, size_bytes: int, *, asks: bool) -> bool:
        """Whether it is worth a closer look: False if such a load takes no time to speak of."""
        load_s = self._load_s(size_bytes, asks)
        return load_s is not None and load_s > MARGIN_S

    def favours_load(self, size_bytes: int, num_tokens: int, *, asks: bool) -> bool:
        """Whether to load these bytes of each rank instead of computing these tokens;
        ``asks``: the store would have to be asked for them first."""
        load_s = self._load_s(size_bytes, asks)
        if not self._is_slower(load_s, num_tokens):
            return True
        if self._skipped is None:
            self._next_trial_s = self._clock() + self._first_pause_s
            self._trials, self._trial = 0, None
            self._say_slow(num_tokens, load_s)
        self._skipped = (size_bytes, num_tokens, asks)
        return False

    def _say_slow(self, num_tokens: int, load_s: float | None) -> None:
        """Where both take about as long the choice changes all the time: said once a while."""
        now_s = self._clock()
        if now_s < self._silent_until_s:
            return
        self._silent_until_s = now_s + _SILENCE_S
        self._said = True
        logger.warning(
            "the remote store is slower than computing: %d tokens in about %.3f s instead "
            "of %.3f s; such hits are computed until it is faster",
            num_tokens,
            load_s,
            self._compute_s(num_tokens),
        )

    def grant_trial(self) -> bool:
        """Whether the hit that is not favoured, the last asked about, is to be loaded all the
        same, to measure."""
        now_s = self._clock()
        if self._skipped is None:
            return False
        _, num_tokens, asks = self._skipped
        may_measure_nothing = self._trial is not None and self._trial[1]
        if now_s < self._next_trial_s and (asks or not may_measure_nothing):
            return False
        self._next_trial_s = now_s + min(self._longest_pause_s, self._first_pause_s)
        self._trial = (num_tokens, asks)
        return True

    def _end_trial(self) -> None:
        """It measures, at the cost of waiting: the next one has to wait longer."""
        self._trial = None
        self._trials = min(self._trials + 1, _MAX_DOUBLINGS)
        pause_s = self._first_pause_s * 2.0**self._trials
        self._next_trial_s = self._clock() + min(self._longest_pause_s, pause_s)

    def patience_of(self, job_id: int) -> float:
        """How long this load may take; then computing was the better idea."""
        load = self._loading.get(job_id)
        return self._longest_load_s if load is None else load.patience_s

    # --- measuring ------------------------------------------------------------------------

    def started(self, job_id: int, size_bytes: int, num_tokens: int) -> None:
        """A load of so many bytes of each rank begins, in place of computing these tokens."""
        compute_s, patience_s = self._compute_s(num_tokens), self._longest_load_s
        if compute_s is not None:
            patience_s = min(patience_s, max(SHORTEST_PATIENCE_S, compute_s))
        if size_bytes and self._trial is not None:
            load_s = self._load_s(size_bytes, asks=False)
            if self._is_slower(load_s, num_tokens):
                self._end_trial()
        batches = self._estimate().batches(size_bytes) if size_bytes else 0
        self._loading[job_id] = _Load(size_bytes, batches, patience_s)
        self._ahead_bytes += size_bytes
        self._ahead_batches += batches

    def ended(self, job_id: int) -> None:
        """All ranks have answered."""
        load = self._loading.pop(job_id, None)
        if load is not None:
            self._ahead_bytes -= load.size_bytes
            self._ahead_batches -= load.batches

    def heard(self, rank: Rank, result: LoadResult) -> None:
        """One rank's part of a load, or of a prefetch, has ended."""
        estimate = self._ranks.setdefault(rank, self._estimate())
        size_bytes, seconds = result.speeds.get(Tier.REMOTE, (0, 0.0))
        estimate.note(size_bytes, seconds)
        load = self._loading.get(result.job_id)
        late = LoadFailure.DEADLINE in result.failed.values()
        if late and load is not None and load.size_bytes:
            # Nobody knows how much longer it would have taken: as long again, say. Less would
            # mean that the next such load looks just worth it. That it waited for its turn
            # says nothing.
            estimate.note_at_least(load.size_bytes, 2 * (load.patience_s - result.waited_s))
        self._look_again()

    def looked_up(self, seconds: float) -> None:
        """The store was asked, and that is how long it took, or was waited for in vain."""
        if not 0.0 <= seconds < math.inf:
            return
        slower = seconds > self._lookup_s > 0.0
        self._lookup_s += (_NEWEST if slower else 1.0) * (seconds - self._lookup_s)
        if self._trial is not None:
            num_tokens, _ = self._trial
            late = seconds >= self._longest_lookup_s
            if late or self._is_slower(self._lookup_s, num_tokens):
                self._end_trial()
        self._look_again()

    def forget(self) -> None:
        """The store was left alone and is back: what it was like before means nothing."""
        self._ranks.clear()
        self._lookup_s = 0.0
        self._look_again()

    def _look_again(self) -> None:
        if self._skipped is None:
            return
        size_bytes, num_tokens, asks = self._skipped
        if not self._is_slower(self._load_s(size_bytes, asks), num_tokens):
            self._skipped = None
            if self._said:
                self._said = False
                logger.info("the remote store is fast enough again; it is loaded from")

    def _is_slower(self, load_s: float | None, num_tokens: int) -> bool:
        """As far as is known."""
        compute_s = self._compute_s(num_tokens)
        return load_s is not None and compute_s is not None and load_s > compute_s + MARGIN_S

    def _load_s(self, size_bytes: int, asks: bool) -> float | None:
        """Until the slowest rank has it, behind what is loading already."""
        known = [
            one.seconds_for(
                self._ahead_bytes + size_bytes, self._ahead_batches + one.batches(size_bytes)
            )
            for one in self._ranks.values()
        ]
        load_s = max((seconds for seconds in known if seconds is not None), default=None)
        if not asks:
            return load_s
        return self._lookup_s + (load_s or 0.0)

    def _estimate(self) -> LoadEstimate:
        return LoadEstimate(self._batch_bytes, self._threads)
