"""Pages of a KV cache: who owns which. The one owner of the free list; one thread only."""

from __future__ import annotations

from draftwood.errors import ResourceExhausted


class PagePool:
    """Hands out page ids ``[0, total)``; a page has one holder at a time."""

    def __init__(self, total: int, page_tokens: int) -> None:
        self.total = total
        self.page_tokens = page_tokens
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_tokens)

    def take(self, tokens: int) -> list[int]:
        """Pages for ``tokens`` tokens; raises ResourceExhausted KV_FULL and takes none if there are not enough."""
        count = self.pages_for(tokens)
        if count > len(self._free):
            message = f"{tokens} tokens need {count} KV pages, {len(self._free)} of {self.total} are free"
            raise ResourceExhausted("KV_FULL", message, retry_after_ms=1000)
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        """Takes pages back. Call it only when no forward that may touch them is running."""
        self._free.extend(reversed(pages))
        if len(self._free) > self.total or len(set(self._free)) != len(self._free):
            raise AssertionError(f"pages given back twice: {pages}")
