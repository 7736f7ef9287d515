"""The Redis user that the sample configuration offers."""

from pathlib import Path

import redis

SAMPLE = Path(__file__).parent.parent / "deploy" / "samples" / "redis.conf"
USER = "spm"
PASSWORD = "hunter2-of-the-engines"


def sample_rules() -> list[str]:
    """Rules of the sample's user, with a password of ours."""
    (line,) = (line for line in SAMPLE.read_text().splitlines() if line.startswith("#user spm "))
    return line.replace("CHANGE-ME", PASSWORD).split()[2:]


def add_user(client: redis.Redis, rules: list[str]) -> None:
    client.execute_command("ACL", "SETUSER", USER, "reset", *rules)  # type: ignore[no-untyped-call]
