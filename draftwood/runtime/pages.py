"""Pages of a KV cache: who holds which, and which of them hold a known text. The one owner of the books; one thread.

Words
-----
held       one or more holders read the page. Only a page with one holder that is not published may be written.
published  full of committed tokens and found by its key: whoever has the same text up to its end may hold it too.
cached     published and held by nobody; evicted when pages are wanted, the one unused for longest first.
free       neither held nor published. ``free + cached + held = total``.
key        128-bit keyed hash of all tokens from the start of the text to the end of the page, as a chain over pages:
           nobody who does not know the process's random secret can make two texts share one.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from draftwood.errors import ResourceExhausted

KEY_BYTES = 16
FIRST_KEY = bytes(KEY_BYTES)
"""Stands for the empty text."""

RUN_PAGES = 8
"""Fewest pages for which it is worth looking for neighbours."""


class PagePool:
    """Hands out page ids ``[0, total)`` and keeps what is published as long as nobody needs the room."""

    def __init__(self, total: int, page_tokens: int, *, prefer_runs: bool = False) -> None:
        """``prefer_runs``: many pages taken at once are neighbours, in order, if so many are free anywhere."""
        self.total = total
        self._prefer_runs = prefer_runs
        self.page_tokens = page_tokens
        self.evictions = 0
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._page_of: dict[bytes, int] = {}  # published pages by key
        self._key_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # the one unused for longest first
        self._secret = secrets.token_bytes(32)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.total - self.free - self.cached

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return self.free + self.cached

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_tokens)

    # --- holding ---

    def take(self, tokens: int) -> list[int]:
        """Pages for ``tokens`` tokens, as ``take_pages``."""
        return self.take_pages(self.pages_for(tokens))

    def take_pages(self, count: int) -> list[int]:
        """Pages with one holder, of any content; raises ResourceExhausted KV_FULL and takes none if they lack."""
        if count > self.available:
            message = f"{count} KV pages are wanted, {self.available} of {self.total} are to be had"
            raise ResourceExhausted("KV_FULL", message, retry_after_ms=1000)
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            self._unpublish(page)
            self._free.append(page)
            self.evictions += 1
        taken = self._take_run(count) if self._prefer_runs and count >= RUN_PAGES else []
        taken = taken or [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def _take_run(self, count: int) -> list[int]:
        """The first ``count`` free pages in a row, off the list of free ones; none if there is no such run."""
        free = np.sort(self._free)
        starts = np.flatnonzero(free[count - 1 :] - free[: len(free) - count + 1] == count - 1)
        if not len(starts):
            return []
        first = int(free[starts[0]])
        self._free = [page for page in self._free if not first <= page < first + count]
        return list(range(first, first + count))

    def hold(self, pages: Iterable[int]) -> None:
        """Adds a holder to published pages."""
        for page in pages:
            assert page in self._key_of, f"page {page} is shared but not published"
            self._holders[page] += 1
            self._cached.pop(page, None)

    def give(self, pages: Sequence[int]) -> None:
        """Takes a holder from each page. Call it only when no forward that may touch them is running.

        Of those that become cached the first of the text are evicted last.
        """
        for page in reversed(pages):
            if not self._holders[page]:
                raise AssertionError(f"page {page} is given back, but nobody holds it: {pages}")
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    # --- known texts ---

    def key(self, before: bytes, tokens: Sequence[int]) -> bytes:
        """Key of the page with ``tokens`` behind the page of key ``before`` (FIRST_KEY: there is none)."""
        content = before + np.array(tokens, np.int32).tobytes()
        return hashlib.blake2b(content, digest_size=KEY_BYTES, key=self._secret).digest()

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Published pages of the longest known beginning of a text, by the keys of its pages."""
        found: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def publish(self, page: int, key: bytes) -> bool:
        """Makes a page of one holder known; it must not be written again. False: another page of that key is known."""
        assert self.is_private(page), f"page {page} is published twice, or not by its one holder"
        if key in self._page_of:
            return False
        self._page_of[key], self._key_of[page] = page, key
        return True

    def is_private(self, page: int) -> bool:
        """True if the page has one holder and is not published: only then may it be written."""
        return self._holders[page] == 1 and page not in self._key_of

    def forget(self, pages: Iterable[int]) -> None:
        """Nobody finds the pages any more, as their content is not to be trusted; holders keep them."""
        for page in pages:
            if page in self._key_of:
                self._unpublish(page)
                if page in self._cached:
                    del self._cached[page]
                    self._free.append(page)

    def _unpublish(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]

    # --- audit ---

    def audit(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong in the books, given the pages of every holder; empty: nothing."""
        holders = [0] * self.total
        for page in (page for table in tables for page in table):
            holders[page] += 1
        free, cached, held = set(self._free), set(self._cached), {p for p, n in enumerate(self._holders) if n}
        problems = []
        if len(self._free) + len(cached) + len(held) != self.total or len(free | cached | held) != self.total:
            owners = Counter(self._free) + Counter(cached) + Counter(held)
            problems += [f"page {page} has {owners[page]} owners" for page in range(self.total) if owners[page] != 1]
            problems.append(f"{self.free} free + {self.cached} cached + {len(held)} held is not {self.total}")
        if holders != self._holders:
            both = enumerate(zip(holders, self._holders, strict=True))
            problems += [f"page {page} has {n} holders, {m} in the books" for page, (n, m) in both if n != m]
        if not cached <= self._key_of.keys():
            problems.append(f"cached but not published: {sorted(cached - self._key_of.keys())}")
        if free & self._key_of.keys():
            problems.append(f"free but published: {sorted(free & self._key_of.keys())}")
        if self._page_of != {key: page for page, key in self._key_of.items()}:
            problems.append(f"{len(self._page_of)} keys are known, {len(self._key_of)} pages are published")
        return problems
