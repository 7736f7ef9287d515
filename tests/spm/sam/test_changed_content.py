"""Blocks in use whose content vLLM drops or replaces: nothing said before is about it."""

from spm.sam.zones import Zone
from tests.spm.sam.kit import BLOCK_TOKENS, Rig, Running, ref_of, ttl

A, B = ref_of("a"), ref_of("b")


def refilled(rig: Rig) -> Running:
    """A protects two blocks; a request that uses them has other content in them by now."""
    ids = rig.turn(A, ttl(60), 1, 2)
    reader = rig.start(1, 2)
    assert reader.ids == ids
    rig.pool.evict_blocks(set(ids))
    reader.request = rig.request(7, 8).request
    rig.pool.cache_full_blocks(reader.request, reader.blocks, 0, 2, BLOCK_TOKENS, 0)
    return reader


def test_a_block_freed_without_content_is_not_kept() -> None:
    rig = Rig()
    ids = rig.turn(A, ttl(60), 1, 2)
    reader = rig.start(1, 2)
    rig.pool.evict_blocks(set(ids))
    rig.free(reader)
    assert rig.zone(ids) is Zone.ORDINARY
    assert rig.order()[:2] == ids[::-1]
    assert rig.table.ledger.num_protected == 0
    rig.sam.check_integrity()


def test_a_block_freed_with_other_content_is_not_kept() -> None:
    rig = Rig()
    reader = refilled(rig)
    rig.free(reader)
    assert rig.zone(reader.ids) is Zone.ORDINARY
    assert rig.table.ledger.num_protected == 0
    rig.sam.check_integrity()


def test_a_claim_on_other_content_counts_alone() -> None:
    rig = Rig()
    reader = refilled(rig)
    rig.end(reader, B, ttl(0))
    assert rig.zone(reader.ids) is Zone.ASSOCIATED
    rig.sam.closed(A, told=True)
    assert rig.zone(reader.ids) is Zone.ASSOCIATED
    rig.sam.check_integrity()


def test_a_session_claims_other_content_in_the_same_block_anew() -> None:
    rig = Rig(2)
    before = rig.turn(A, None, 1)
    rig.after(1)
    assert rig.turn(A, ttl(60), 7) == before
    assert rig.zone(before) is Zone.SOON


def test_a_hint_without_a_request_is_not_about_content_that_has_gone() -> None:
    rig = Rig(3)
    ids = rig.turn(A, None, 1, 2)
    assert sorted(rig.other(7, 8)) == sorted(ids)
    _, done = rig.sam.retain(A, ttl(60))
    assert (done.blocks, rig.table.ledger.num_protected) == (0, 0)
    assert rig.zone(ids) is Zone.ORDINARY
