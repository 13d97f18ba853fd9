"""Notices when a draft's guesses stop being taken: most faults of drafts show in nothing else.

A wrong tokenizer, a model of another kind, positions off by one: the text stays right whatever drafts do, it only comes
more slowly. Pure; one watch a draft model and rule, fed by every step that verified nodes of it.
"""

from __future__ import annotations

from dataclasses import dataclass

FAST_STEPS, SLOW_STEPS = 64, 1024
"""Steps over which acceptance is averaged: as it is now, and as it usually is."""

FEWEST_STEPS = 128
"""Steps before anything is said."""

COLLAPSED, RECOVERED = 0.3, 0.7
"""Shares of the usual acceptance below which it counts as collapsed, and from which on as recovered."""

HOPELESS = 0.03
"""Acceptance that is a collapse whatever is usual."""


@dataclass
class AcceptanceWatch:
    """Share of steps whose first guess was taken, now and usually."""

    now: float = 0.0
    usual: float = 0.0
    collapsed: bool = False
    _steps: int = 0

    def observe(self, accepted: bool) -> bool:
        """One session's step with nodes; returns whether acceptance has collapsed with it."""
        self._steps += 1
        self.now += (accepted - self.now) / min(self._steps, FAST_STEPS)
        if not self.collapsed:  # what is usual is not learnt from a collapse
            self.usual += (accepted - self.usual) / min(self._steps, SLOW_STEPS)
        if self._steps < FEWEST_STEPS:
            return False
        before = self.collapsed
        if before:
            self.collapsed = self.now < max(RECOVERED * self.usual, 2 * HOPELESS)
        else:
            self.collapsed = self.now < max(COLLAPSED * self.usual, HOPELESS)
        return self.collapsed and not before
