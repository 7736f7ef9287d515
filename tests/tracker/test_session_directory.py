"""Sessions in the order of their ids, page by page."""

from hypothesis import given
from hypothesis import strategies as st

from tracker.ids import SessionId, SessionRef, TenantId
from tracker.session_directory import SessionDirectory

REFS = st.builds(
    SessionRef,
    st.sampled_from(["a", "b"]).map(TenantId),
    st.text("xyz", min_size=1, max_size=3).map(SessionId),
)


@given(st.lists(REFS, unique=True), st.data())
def test_pages_are_a_sorted_list_cut_into_pieces(
    refs: list[SessionRef], data: st.DataObject
) -> None:
    directory = SessionDirectory()
    for ref in refs:
        directory.add(ref)
    gone = data.draw(st.lists(st.sampled_from(refs), unique=True)) if refs else []
    for ref in gone:
        directory.remove(ref)
    left = [ref for ref in refs if ref not in gone]
    directory.check_integrity(left)
    limit = data.draw(st.integers(1, 4))
    for tenant in (TenantId("a"), TenantId("b")):
        expected = sorted(ref.session_id for ref in left if ref.tenant == tenant)
        seen: list[str] = []
        after: str | None = None
        while page := directory.page(tenant, after, limit):
            assert len(page) <= limit
            seen += [ref.session_id for ref in page]
            after = seen[-1]
        assert seen == expected
