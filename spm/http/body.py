"""Reading a request body up to a bound, and handing it on as if nobody had read it."""

from dataclasses import dataclass

from starlette.types import Message, Receive


@dataclass(frozen=True, slots=True)
class Buffered:
    """What was read; ``ended``: the whole body. ``then`` is the message that came instead of
    more body, which is the client's disconnect."""

    content: bytes
    ended: bool
    too_long: bool = False
    then: Message | None = None

    def replay(self, receive: Receive, content: bytes | None = None) -> Receive:
        """A ``receive`` that gives ``content`` (by default what was read), then what
        ``receive`` gives: the rest of a body that was too long, or the client's disconnect."""
        body = self.content if content is None else content
        messages: list[Message] = [
            {"type": "http.request", "body": body, "more_body": not self.ended}
        ]
        if self.then is not None:
            messages.append(self.then)
        messages.reverse()

        async def replayed() -> Message:
            return messages.pop() if messages else await receive()

        return replayed


async def read_body(receive: Receive, limit_bytes: int) -> Buffered:
    """Read to the end, to the first message above ``limit_bytes``, or to a disconnect."""
    content = bytearray()  # one buffer, not a list of chunks: their number is the client's choice
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return Buffered(bytes(content), ended=False, then=message)
        content += message.get("body", b"")
        ended = not message.get("more_body", False)
        if ended or len(content) > limit_bytes:
            return Buffered(bytes(content), ended, too_long=len(content) > limit_bytes)
