"""What an engine tells others while it serves: lifecycle records and vLLM's KV events."""

from collections import Counter

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockStored,
    EventBatch,
    EventPublisher,
)

from spm.lifecycle import LifecycleKind, LifecycleRecord, decode_event
from tests.connectors.scheduler.scenarios import Build, parts
from tests.connectors.scheduler.simulated_engine import Engine
from tests.connectors.scheduler.simulated_worker import Conditions
from tests.connectors.scheduler.test_session_operations import overwrite, resumed, turn

full = parts("full")


def records(engine: Engine) -> list[LifecycleRecord]:
    told, engine.keeper.published = engine.keeper.published, []
    return [decode_event(one) for one in told]


def kinds(engine: Engine) -> Counter[LifecycleKind]:
    return Counter(record.kind for record in records(engine))


@full
def test_a_sessions_life_is_told(build: Build) -> None:
    engine = build(extra={"events_stream": "spm:events"})
    turn(engine)
    told = records(engine)
    assert [record.seq for record in told] == list(range(1, len(told) + 1))
    seen = {record.kind for record in told}
    assert LifecycleKind.SESSION_OPENED in seen
    saved = [r for r in told if r.kind is LifecycleKind.BLOCKS_SAVED]
    assert sum(len(record.keys) for record in saved) == 16
    (associated,) = [r for r in told if r.kind is LifecycleKind.BLOCKS_ASSOCIATED]
    assert (associated.session_id, len(associated.keys)) == ("s", 16)
    overwrite(engine)
    records(engine)
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    told = records(engine)
    assert [r.kind for r in told if r.edit is not None] == [
        LifecycleKind.EDIT_ASKED,
        LifecycleKind.EDIT_DONE,
    ]
    loaded = [r for r in told if r.kind is LifecycleKind.BLOCKS_LOADED]
    assert sum(len(record.keys) for record in loaded) == 16
    assert {record.session_id for record in loaded} == {"s"}
    engine.manage("end_session", session_id="s", tree=False, operation_id="end")
    assert kinds(engine)[LifecycleKind.SESSION_FREED] == 1


@full
def test_without_a_stream_nothing_is_built(build: Build) -> None:
    engine = build()
    turn(engine)
    assert not engine.half.sessions.bus.active
    assert engine.keeper.published == []


@full
def test_blocks_a_request_loads_are_told_once(build: Build) -> None:
    engine = build(extra={"events_stream": "e"}, world_size=2)
    turn(engine)
    overwrite(engine)
    records(engine)
    engine.add("again", resumed(engine), session="s")
    engine.run()
    loaded = [r for r in records(engine) if r.kind is LifecycleKind.BLOCKS_LOADED]
    assert sum(len(record.keys) for record in loaded) == 16


class Router(EventPublisher):
    """What vLLM's scheduler publishes, remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[BlockStored] = []

    def publish(self, events: EventBatch) -> None:
        self.stored += [event for event in events.events if isinstance(event, BlockStored)]

    def shutdown(self) -> None:
        """Nothing runs."""


@full
def test_routers_hear_of_every_tier(build: Build) -> None:
    engine = build(conditions=Conditions(keeps_host=True))
    engine.half.publish_kv_events()
    engine.scheduler.kv_event_publisher = router = Router()
    turn(engine)
    assert Counter(e.medium for e in router.stored) == {MEDIUM_CPU: 16, MEDIUM_STORAGE: 16}
    overwrite(engine)
    router.stored.clear()
    engine.edit("s", {"type": "prefetch"})
    engine.run()
    events = router.stored
    published = [e for e in events if e.medium == MEDIUM_GPU]
    assert len(published) == 16
    assert {event.session_id for event in published} == {"s"}
