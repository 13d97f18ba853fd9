"""Which session holds which pages: placing, growing, sharing of prefixes, and who gives way when pages run short.

A session holds pages for its whole committed text, and for nodes as far as pages are to spare. Full pages of committed
tokens are published as soon as their keys and values are in place; a text that begins with the same tokens holds them
too, but for its last token, which is always computed. Shared pages lie wholly below ``cached`` and every forward writes
at ``cached`` and behind, so no page is written that another session reads.

Under pressure, in this order: cached pages are evicted, pages held for nodes are given back, the youngest session is
preempted. The oldest one is never preempted by another and its text fits the cache, so there is always one that ends.

Every method runs between two forwards: the pages that it gives back are in use by none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from draftwood.errors import ResourceExhausted
from draftwood.runtime.pages import FIRST_KEY, PagePool
from draftwood.telemetry import METRICS
from verifier_service.session import GenerateRequest, Session


class SessionPages:
    """The verifier's use of its page pool. Of several sessions the oldest comes first."""

    def __init__(self, pool: PagePool, *, share: bool) -> None:
        """``share``: whether prefixes are published and looked for."""
        self._pool = pool
        self._share = share

    def check_fits(self, request: GenerateRequest) -> None:
        """Raises ResourceExhausted KV_FULL if the text could not be held by the whole cache."""
        need, whole = self._pool.pages_for(len(request.prompt) + request.ending.max_tokens), self._pool.total
        if need > whole:
            raise ResourceExhausted("KV_FULL", f"the request needs {need} KV pages, the cache has {whole} in all")

    # --- in and out ---

    def place(self, session: Session, others: int) -> bool:
        """Pages for the session's text, shared as far as it is known; False, and none, if they are too few.

        Beside ``others`` that run it leaves a page for each of them and one for itself to grow, so that what is
        placed is not preempted at once.
        """
        pool = self._pool
        self._extend_keys(session)
        known = pool.find(session.keys)
        pool.hold(known)
        need = pool.pages_for(len(session.tokens)) - len(known)
        if need + (others + 1 if others else 0) > pool.available:
            pool.give(known)
            return False
        session.pages = known + self._take(need)
        session.published = len(known)
        self._reused(session, len(known) * pool.page_tokens)
        METRICS.kv_page_events["reused"].inc(len(known))
        return True

    def release(self, session: Session, *, sound: bool = True) -> None:
        """Takes the session's pages back; what is published stays known, unless the content is not ``sound``."""
        if sound:
            self.publish(session)
        else:
            self._pool.forget(session.pages)
        self._pool.give(session.pages)
        session.pages, session.cached, session.published, session.node_room = [], 0, 0, 0

    # --- around a step ---

    def make_room(self, sessions: Sequence[Session], share: Callable[[Session], int]) -> list[Session]:
        """Pages for a step of ``sessions`` with up to ``share(session)`` nodes each; returns those that had to give up
        theirs.

        A session whose text is still being computed takes over what others have published of it meanwhile. Nodes get
        pages that leave one for each session, and nobody is preempted for them.
        """
        page = self._pool.page_tokens
        staying, leaving = list(sessions), list[Session]()
        for session in sessions:
            if session.pages and len(session.tokens) - session.cached > 1:
                self._adopt(session)
            while session.pages and len(session.tokens) > len(session.pages) * page:
                if self._pool.available:
                    session.pages += self._take(1)
                elif not self._trim(staying):
                    leaving.append(staying.pop())
                    self.release(leaving[-1])
        spare = self._pool.available - len(staying)
        for session in staying:
            room = len(session.pages) * page - len(session.tokens)
            if session.tree.size - 1 > room and session.decoding:
                nodes = min(session.tree.size - 1, share(session))
                more = max(0, min(spare, self._pool.pages_for(nodes - room)))
                session.pages += self._take(more)
                spare -= more
                room += more * page
            session.node_room = room
        return leaving

    def _trim(self, sessions: Iterable[Session]) -> int:
        """Takes back what sessions hold for nodes only; returns the number of pages."""
        trimmed = 0
        for session in sessions:
            keep = self._pool.pages_for(len(session.tokens))
            self._pool.give(session.pages[keep:])
            trimmed += len(session.pages[keep:])
            del session.pages[keep:]
        return trimmed

    def _adopt(self, session: Session) -> None:
        """Takes over the pages behind ``cached`` that others have published since the session was placed."""
        pool, known = self._pool, list[int]()
        first = session.cached // pool.page_tokens
        if first < len(session.keys) and (known := pool.find(session.keys[first:])):
            last = first + len(known)
            pool.hold(known)
            pool.give(session.pages[first:last])
            session.pages[first:last] = known
            session.published = last
            self._reused(session, last * pool.page_tokens)
            METRICS.kv_page_events["reused"].inc(len(known))

    def _reused(self, session: Session, cached: int) -> None:
        if not session.stats.preemptions:
            ours = min(cached, len(session.request.prompt)) - min(session.cached, len(session.request.prompt))
            session.stats.cached_prompt += ours
        session.cached = cached

    def publish(self, session: Session) -> None:
        """Makes the pages known that ``cached`` tokens fill; their keys and values must be in place."""
        full = session.cached // self._pool.page_tokens
        if not self._share or full == session.published:
            return
        self._extend_keys(session)
        for k in range(session.published, full):
            METRICS.kv_page_events["published"].inc(self._pool.publish(session.pages[k], session.keys[k]))
        session.published = full

    def _extend_keys(self, session: Session) -> None:
        """Keys of all pages that can be shared: full, and without the last token, whose logits are wanted."""
        page, tokens, keys = self._pool.page_tokens, session.tokens, session.keys
        for k in range(len(keys), (len(tokens) - 1) // page if self._share else 0):
            keys.append(self._pool.key(keys[-1] if keys else FIRST_KEY, tokens[k * page : (k + 1) * page]))

    def _take(self, count: int) -> list[int]:
        before = self._pool.evictions
        pages = self._pool.take_pages(count)
        METRICS.kv_page_events["evicted"].inc(self._pool.evictions - before)
        return pages

    # --- audit ---

    def audit(self, sessions: Iterable[Session]) -> list[str]:
        """What is wrong between the books of the pool and those of all sessions; empty: nothing."""
        sessions = list(sessions)
        problems = self._pool.audit([session.pages for session in sessions])
        for session in sessions:
            for page in session.pages[session.cached // self._pool.page_tokens :]:
                if not self._pool.is_private(page):
                    problems.append(f"session {session.request.session_id} writes page {page}, which is not its own")
        return problems
