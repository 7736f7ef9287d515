"""Management requests at the engine's door: scoped, bounded, idempotent, never an exception."""

from typing import Any

import pytest

from spm.config import SpmConfig
from spm.events import RequestEnded, RequestStarted, SessionOpened
from spm.manager import SessionAwarePoolingManager
from spm.metrics import Metric, metric_key
from spm.sam.management import SessionManagement
from spm.sam.operations import OperationLog
from spm.sam.zones import Zone
from spm.tenancy import TenantVerifier, tenant_proof
from tests.spm.sam.kit import Rig, ref_of, ttl
from tracker.ids import SessionRef, TenantId

PARENT, CHILD, OTHERS = ref_of("p"), ref_of("p/c"), ref_of("p", "other")


class Desk:
    """A pool with sessions, and the desk that manages them."""

    def __init__(self) -> None:
        self.rig = Rig(32)
        config = SpmConfig(max_sessions=100)
        rig = self.rig
        self.spm = SessionAwarePoolingManager(config, 1, rig.counters, rig.clock, rig.sam.closed)
        self.tenants = TenantVerifier()
        self.desk = SessionManagement(rig.sam, self.spm, self.tenants, rig.counters)
        self.ids = self.turn(PARENT, 1, 2, 3)
        self.turn(CHILD, 1, 2, 4, parent=PARENT)
        self.turn(OTHERS, 7, 8)

    def turn(self, ref: SessionRef, *path: int, parent: SessionRef | None = None) -> list[int]:
        self.spm.handle(SessionOpened(ref, parent))
        self.spm.handle(RequestStarted(ref))
        ids = self.rig.turn(ref, ttl(60), *path)
        self.spm.handle(RequestEnded(ref, 60))
        return ids

    def ask(self, op: str, tenant: str = "default", **fields: Any) -> dict[str, Any]:  # noqa: ANN401
        return self.handle({"v": 1, "op": op, "tenant": tenant, **fields})

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = self.desk.handle(request)
        assert isinstance(answer, dict)
        self.rig.sam.check_integrity()
        self.spm.check_integrity()
        return answer


def test_a_session_is_described() -> None:
    session = Desk().ask("get_session", session_id="p")["session"]
    assert session == {
        "id": "p",
        "parent_session_id": None,
        "children": 1,
        "active_requests": 0,
        "idle_s": 0.0,
        "ttl_left_s": 60.0,
        "class": "soon",
        "blocks": 3,
        "origin": "local",
        "auto": None,
        "operations": [],
        "residency": {"gpu": 3, "host": 0, "remote": 0},
    }


def test_another_tenants_session_is_not_found_and_stays_as_it_is() -> None:
    desk = Desk()
    hint = {"session_id": "p/c", "context_management": {"edits": [{"type": "evict"}]}}
    for op, fields in (
        ("get_session", {"session_id": "p/c"}),
        ("apply", {"hint": hint, "operation_id": "1"}),
        ("end_session", {"session_id": "p/c", "tree": True, "operation_id": "2"}),
    ):
        assert desk.ask(op, "other", **fields)["status"] == "not_found"
    assert [s["id"] for s in desk.ask("list_sessions", "other", limit=9)["sessions"]] == ["p"]
    assert desk.ask("get_operation", operation_id="1")["status"] == "not_found"
    assert desk.ask("get_session", session_id="p/c")["session"]["class"] == "soon"


def test_sessions_are_listed_page_by_page() -> None:
    desk = Desk()
    first = desk.ask("list_sessions", limit=1)
    assert ([s["id"] for s in first["sessions"]], first["has_more"]) == (["p"], True)
    second = desk.ask("list_sessions", limit=1, after="p")
    assert ([s["id"] for s in second["sessions"]], second["has_more"]) == (["p/c"], False)
    assert desk.ask("list_sessions", limit=0)["status"] == "rejected"


def test_a_repeated_operation_has_no_second_effect() -> None:
    desk = Desk()
    hint = {"session_id": "p", "state": "waiting_user"}
    first = desk.ask("apply", hint=hint, operation_id="x")
    assert first["retention"] == {"class": "later", "ttl_s": 300.0, "blocks": 3}
    again = desk.ask("apply", hint={"session_id": "p", "state": "finished"}, operation_id="x")
    assert again == {**first, "duplicate": True}
    assert desk.ask("get_operation", operation_id="x")["operation"] == first
    assert desk.rig.zones(desk.ids)[2] is Zone.LATER


def test_a_tree_ends_children_first_and_what_it_alone_had_goes_first() -> None:
    desk = Desk()
    answer = desk.ask("end_session", session_id="p", tree=True, operation_id="1")
    assert (answer["status"], answer["ended"]) == ("ok", ["p/c", "p"])
    assert desk.rig.zone(desk.ids) is Zone.FINISHED
    assert desk.ask("get_session", session_id="p")["status"] == "not_found"
    assert desk.ask("get_session", "other", session_id="p")["status"] == "ok"


def test_a_parent_ends_alone_and_its_child_keeps_the_shared_prefix() -> None:
    desk = Desk()
    assert desk.ask("end_session", session_id="p", operation_id="1")["ended"] == ["p"]
    assert desk.rig.zones(desk.ids) == [Zone.SOON, Zone.SOON, Zone.FINISHED]


def test_answers_are_remembered_up_to_a_bound() -> None:
    desk = Desk()
    desk.desk._operations = OperationLog(2)
    for number in "123":
        desk.ask("apply", hint={"session_id": "p"}, operation_id=number)
    found = [desk.ask("get_operation", operation_id=n)["status"] for n in "123"]
    assert found == ["not_found", "ok", "ok"]


def test_a_flood_of_operations_forgets_the_floods_own_answers() -> None:
    desk = Desk()
    desk.desk._operations = OperationLog(5)
    desk.ask("apply", "other", hint={"session_id": "p"}, operation_id="theirs")
    for number in range(50):
        desk.ask("apply", hint={"session_id": "p"}, operation_id=str(number))
    assert desk.ask("get_operation", "other", operation_id="theirs")["status"] == "ok"
    assert desk.ask("get_operation", operation_id="49")["status"] == "ok"
    assert desk.ask("get_operation", operation_id="45")["status"] == "not_found"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({}, "unsupported"),
        ({"v": 2, "op": "get_session", "tenant": "default"}, "unsupported"),
        ({"v": 1, "op": "explode", "tenant": "default"}, "unsupported"),
        ({"v": 1, "op": "get_session", "tenant": "two words"}, "unsupported"),
        ({"v": 1, "op": "get_session", "tenant": "default", "session_id": "\n"}, "rejected"),
        ({"v": 1, "op": "apply", "tenant": "default", "hint": []}, "rejected"),
        ({"v": 1, "op": "apply", "tenant": "default", "hint": {}}, "rejected"),
        ({"v": 1, "op": "register_frontend", "secret": b"short"}, "rejected"),
    ],
)
def test_nonsense_is_refused_in_words(request_: dict[str, Any], status: str) -> None:
    desk = Desk()
    desk.rig.counters.drain()
    answer = desk.handle(request_)
    assert answer["status"] == status
    assert answer["detail"]
    assert desk.rig.counters.drain()[metric_key(Metric.MANAGEMENT, status)] == 1


def test_a_bug_is_an_answer_and_not_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    monkeypatch.setattr(desk.rig.claims, "num_resident", lambda ref: 1 / 0)
    assert desk.ask("get_session", session_id="p")["status"] == "failed"
    assert desk.rig.counters.drain()[metric_key(Metric.INTERNAL_ERRORS, "management")] == 1


def test_a_frontend_that_registered_can_prove_tenants() -> None:
    desk = Desk()
    secret = bytes(range(32))
    assert desk.ask("register_frontend", secret=secret)["status"] == "ok"
    tenant = TenantId("t")
    claim = {"spm_tenant": {"id": tenant, "proof": tenant_proof(secret, tenant)}}
    assert desk.tenants.tenant_of(claim) == tenant
