"""What events about blocks tell the residency index."""

from spm.events import (
    BlockEvent,
    BlocksConfirmed,
    BlocksDoubted,
    BlocksMissing,
    BlocksStored,
    CacheReset,
    HostChanged,
    KeysGone,
    KeysSeen,
)
from spm.residency import ResidencyIndex


def note_blocks(residency: ResidencyIndex, event: BlockEvent) -> None:
    """Apply one event; unknown keys change nothing. Scheduler thread."""
    match event:
        case HostChanged(rank, changes):
            residency.note_host(rank, changes)
        case BlocksStored(rank, stored):
            residency.note_remote_stored(rank, stored)
        case BlocksConfirmed(confirmed):
            residency.confirm_remote(confirmed)
        case BlocksMissing(missing):
            residency.forget(missing)
        case BlocksDoubted(doubted):
            residency.doubt_remote(doubted)
        case KeysSeen(seen, asked_s):
            residency.note_seen(seen, asked_s)
        case KeysGone(gone, asked_s):
            residency.note_gone(gone, asked_s)
        case CacheReset():
            residency.clear()
