"""The real drafter joined to an engine without a wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scripted import VOCAB

from draft_service.drafter import SessionCommitted, SessionStart
from draft_service.drafters.lm import LmDrafter
from draftwood.config import DraftSettings
from draftwood.parameters import SamplingParams
from draftwood.runtime.batch import Rows
from draftwood.runtime.model import ModelRuntime
from draftwood.vocabulary import Vocabulary
from verifier_service.engine import Engine, Outcome
from verifier_service.live_tree import Nodes


def lm_drafter(runtime: ModelRuntime, **settings: object) -> LmDrafter:
    chosen = DraftSettings(page_tokens=runtime.pool.page_tokens, **settings)  # type: ignore[arg-type]
    vocabulary = Vocabulary(tuple(str(i) for i in range(VOCAB)), frozenset(), VOCAB)
    return LmDrafter(runtime, chosen, "tiny", vocabulary)


def note_forwards(runtime: ModelRuntime, note: Callable[[Sequence[Rows]], None]) -> None:
    """Calls ``note`` with the parts of every forward of a draft's model: with children picked, and without."""

    def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(parts: Sequence[Rows], *rest: Any) -> Any:
            note(parts)
            return forward(parts, *rest)

        return run

    for name in ("forward", "children"):
        setattr(runtime, name, noted(getattr(runtime, name)))


@dataclass
class LmDraft:
    """The real drafter on the engine's side of the wire; it works ahead as far as its settings say."""

    drafter: LmDrafter
    link: int = 0

    def join(self, engine: Engine, name: str, handle: int) -> None:
        start = engine.join(self.link, handle, name)
        sampling = SamplingParams(start.temperature, seed=start.seed)
        told = SessionStart(start.epoch, start.tokens, sampling, start.budget, VOCAB, 255, 32, 512, start.rule)
        self.drafter.open((self.link, handle), told)

    def work(self, engine: Engine) -> None:
        while self.drafter.wants_work():
            for (link, handle), g in self.drafter.work():
                nodes = Nodes(g.epoch, g.first_id, g.parent, g.token, g.score, g.drawn)
                engine.grow(link, handle, nodes, complete=g.complete)

    def hear(self, engine: Engine, outcome: Outcome) -> None:
        for c in outcome.commits.get(self.link, []):
            self.drafter.commit((self.link, c.handle), SessionCommitted(c.epoch, c.length, c.tokens, c.budget))
        for handle in outcome.stops.get(self.link, []):
            self.drafter.close((self.link, handle))
