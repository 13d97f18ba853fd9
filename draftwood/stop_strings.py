"""Stop strings, searched for in a text that grows by pieces.

The text ends at the first character that completes a stop string; of several that this character completes, the
longest counts. So the end does not depend on how the text is cut into tokens or steps. Characters are code points and
are compared as they are: no case folding, no normalisation.

The search is the automaton of Aho and Corasick (CACM 1975): a node for every beginning of a stop string, and the node
a search is at is the longest beginning that the text so far ends with. So it also says how much of the text may still
turn out to belong to a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """An immutable automaton; a search is a node number that starts at 0."""

    def __init__(self, strings: Iterable[str]) -> None:
        """``strings`` are not empty."""
        self._children: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]  # node of the longest proper suffix that is a beginning, too
        self._length: list[int] = [0]
        self._found: list[str | None] = [None]  # longest stop string that a text at this node ends with
        for string in strings:
            assert string
            self._found[self._path(string)] = string
        self._link()

    def _path(self, string: str) -> int:
        node = 0
        for character in string:
            child = self._children[node].get(character)
            if child is None:
                child = self._children[node][character] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._length.append(self._length[node] + 1)
                self._found.append(None)
            node = child
        return node

    def _link(self) -> None:
        """Breadth first, so that shorter suffixes are done before they are needed."""
        todo = deque(self._children[0].values())
        while todo:
            node = todo.popleft()
            self._found[node] = self._found[node] or self._found[self._fallback[node]]
            for character, child in self._children[node].items():
                self._fallback[child] = self.next(self._fallback[node], character)
                todo.append(child)

    def next(self, node: int, character: str) -> int:
        """Where a search at ``node`` is after one more character."""
        children = self._children
        while node and character not in children[node]:
            node = self._fallback[node]
        return children[node].get(character, 0)

    def found(self, node: int) -> str | None:
        """The longest stop string that the text ends with at ``node``."""
        return self._found[node]

    def pending(self, node: int) -> int:
        """How many of the text's last characters may be the beginning of a stop string that is not complete."""
        while node and not self._children[node]:
            node = self._fallback[node]
        return self._length[node]
