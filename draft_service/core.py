"""What the draft worker's thread drives: one drafter, all sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_service.drafter import Drafter, Key, SessionCommitted, SessionStart
from draftwood.features import Features
from draftwood.telemetry import get_logger
from draftwood.wire import SessionGrowth

log = get_logger(__name__)


@dataclass(slots=True)
class Outcome:
    """Growth to send, and sessions given up, by link."""

    growths: dict[int, list[SessionGrowth]] = field(default_factory=dict)
    leaves: dict[int, list[int]] = field(default_factory=dict)


class DraftCore:
    """Keeps the books around a drafter: which sessions there are, and how long rounds take."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.nodes_drafted = 0
        self.round_s = 0.0  # mean of the last rounds
        self._heard_s: dict[Key, float] = {}

    @property
    def sessions(self) -> int:
        return len(self._heard_s)

    def due(self) -> float | None:
        return 0.0 if self.drafter.wants_work() else None

    def step(self) -> Outcome:
        out = Outcome()
        for key, growth in self.drafter.work():
            out.growths.setdefault(key[0], []).append(growth)
            self.nodes_drafted += len(growth.token)
            took_s = time.monotonic() - self._heard_s[key]
            self.round_s = took_s if not self.round_s else 0.9 * self.round_s + 0.1 * took_s
        return out

    def crash(self, error: Exception) -> Outcome:
        """A forward has raised: all sessions are given up; the verifier goes on without us."""
        out = Outcome()
        for key in list(self._heard_s):
            out.leaves.setdefault(key[0], []).append(key[1])
            self.close(key)
        return out

    def open(self, key: Key, start: SessionStart) -> bool:
        """Takes a session; False: its text has a token that the draft lacks, so it must be left."""
        if not self._knows(start.tokens):
            return False
        self._heard_s[key] = time.monotonic()
        return self._alone(key, lambda: self.drafter.open(key, start))

    def commit(self, key: Key, committed: SessionCommitted) -> bool:
        """Moves a session on; False: its text has a gap or a token that the draft lacks, so it must be left."""
        if key not in self._heard_s:
            return True
        self._heard_s[key] = time.monotonic()
        if not self._knows(committed.tokens):
            self.close(key)
            return False
        return self._alone(key, lambda: self.drafter.commit(key, committed))

    def feed(self, key: Key, first: int, features: Features) -> bool:
        """Hands features over; False: they do not fit what is known, so the session must be left."""
        if key not in self._heard_s:
            return True
        return self._alone(key, lambda: self.drafter.feed(key, first, features))

    def _alone(self, key: Key, act: Callable[[], None]) -> bool:
        """Whatever is wrong with a session gives up that session and nobody else's."""
        try:
            act()
        except ValueError as error:
            log.warning("session given up", error=str(error))
        except Exception:
            log.exception("session given up")
        else:
            return True
        self.close(key)
        return False

    def _knows(self, tokens: Sequence[int]) -> bool:
        """The target may have more tokens than the draft; the draft's model has no row for them."""
        vocabulary = self.drafter.vocabulary
        known = vocabulary is None or max(tokens, default=0) < vocabulary.vocab_size
        if not known:
            log.warning("session given up", error=f"token {max(tokens)} is not in the draft's vocabulary")
        return known

    def close(self, key: Key) -> None:
        self._heard_s.pop(key, None)
        self.drafter.close(key)

    def close_link(self, link: int) -> None:
        for key in [k for k in self._heard_s if k[0] == link]:
            self.close(key)
