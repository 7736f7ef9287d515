"""What the store keeper has been asked to do: bounded queues, but for the keys kept alive."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from spm.errors import IntegrityError
from spm.keys import StoreKey
from tracker.ids import BlockKey

MAX_QUESTIONS = 1024
MAX_CHECKED_KEYS = 1_000_000
MAX_DELETES = 100_000
MAX_DOCUMENTS = 1024
MAX_DOCUMENT_BYTES_QUEUED = 64 * 1024 * 1024
MAX_EVENTS = 10_000
MAX_EVENT_BYTES_QUEUED = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class KeyCheck:
    """Is every rank's value of these keys there?"""

    number: int
    keys: tuple[BlockKey, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class DocumentQuery:
    """What is in this document?"""

    number: int
    name: StoreKey
    max_bytes: int
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Document:
    """A document to write."""

    name: StoreKey
    content: bytes
    ttl_s: int


Question = KeyCheck | DocumentQuery


class KeeperQueues:
    """First in, first out in each class. Whoever owns it holds a lock and counts what is
    refused or dropped. Nothing here knows the store."""

    def __init__(self) -> None:
        self._questions: deque[Question] = deque()
        self._checked_keys = 0
        self._documents: dict[StoreKey, Document] = {}
        self._document_bytes = 0
        self._events: deque[bytes] = deque()
        self._event_bytes = 0
        self._deletes: dict[BlockKey, None] = {}

    @property
    def has_writes(self) -> bool:
        """Whether documents or events wait."""
        return bool(self._documents or self._events)

    @property
    def has_deletes(self) -> bool:
        """Whether keys wait to be deleted."""
        return bool(self._deletes)

    # --- questions ------------------------------------------------------------------------

    def ask(self, question: Question, unread_answers: int) -> bool:
        """False if too many wait, or have answers that nobody reads. A single check may be
        of any size."""
        if len(self._questions) + unread_answers >= MAX_QUESTIONS:
            return False
        size = _checked_keys(question)
        if size and self._checked_keys and self._checked_keys + size > MAX_CHECKED_KEYS:
            return False
        self._questions.append(question)
        self._checked_keys += size
        return True

    def next_question(self) -> Question | None:
        """The oldest; None if none waits."""
        if not self._questions:
            return None
        question = self._questions.popleft()
        self._checked_keys -= _checked_keys(question)
        return question

    # --- documents and events -------------------------------------------------------------

    def write(self, document: Document) -> int:
        """In place of an older one of the same name. Returns how many were dropped for it."""
        self._forget_document(document.name)
        self._documents[document.name] = document
        self._document_bytes += len(document.content)
        dropped = 0
        while (
            len(self._documents) > MAX_DOCUMENTS or self._document_bytes > MAX_DOCUMENT_BYTES_QUEUED
        ):
            self._forget_document(next(iter(self._documents)))
            dropped += 1
        return dropped

    def write_again(self, document: Document) -> int:
        """One that could not be written, unless there is a newer one."""
        return 0 if document.name in self._documents else self.write(document)

    def next_document(self) -> Document | None:
        """The one waiting longest; None if none does."""
        name = next(iter(self._documents), None)
        return None if name is None else self._forget_document(name)

    def publish(self, entries: Iterable[bytes]) -> int:
        """Add events. Returns how many older ones were dropped for them."""
        dropped = 0
        for entry in entries:
            self._events.append(entry)
            self._event_bytes += len(entry)
            while len(self._events) > MAX_EVENTS or self._event_bytes > MAX_EVENT_BYTES_QUEUED:
                self._event_bytes -= len(self._events.popleft())
                dropped += 1
        return dropped

    def next_events(self, limit: int) -> list[bytes]:
        """Up to ``limit`` events, oldest first."""
        events = [self._events.popleft() for _ in range(min(limit, len(self._events)))]
        self._event_bytes -= sum(map(len, events))
        return events

    # --- keys to delete -------------------------------------------------------------------

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """How many are accepted; those that wait already are."""
        accepted = 0
        for key in keys:
            if key in self._deletes or len(self._deletes) < MAX_DELETES:
                self._deletes[key] = None
                accepted += 1
        return accepted

    def spare(self, keys: Iterable[BlockKey]) -> None:
        """These are wanted again."""
        if self._deletes:
            for key in keys:
                self._deletes.pop(key, None)

    def next_deletes(self, limit: int) -> list[BlockKey]:
        """Up to ``limit`` keys, those waiting longest first."""
        keys = list(islice(self._deletes, limit))
        for key in keys:
            del self._deletes[key]
        return keys

    # --- the rest -------------------------------------------------------------------------

    def drop_named(self) -> tuple[list[Question], int, int]:
        """Drop all that names keys or documents: the questions, and how many documents and
        deletes there were."""
        questions, documents, deletes = self._questions, self._documents, self._deletes
        self._questions, self._documents, self._deletes = deque(), {}, {}
        self._checked_keys = self._document_bytes = 0
        return list(questions), len(documents), len(deletes)

    def check_integrity(self) -> None:
        """Raise :class:`IntegrityError` if sizes were miscounted."""
        counted = (self._checked_keys, self._document_bytes, self._event_bytes)
        held = (
            sum(map(_checked_keys, self._questions)),
            sum(len(document.content) for document in self._documents.values()),
            sum(map(len, self._events)),
        )
        if counted != held:
            raise IntegrityError(f"keeper counts {counted} keys and bytes, holds {held}")

    def _forget_document(self, name: StoreKey) -> Document | None:
        document = self._documents.pop(name, None)
        if document is not None:
            self._document_bytes -= len(document.content)
        return document


def _checked_keys(question: Question) -> int:
    return len(question.keys) if isinstance(question, KeyCheck) else 0
