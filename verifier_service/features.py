"""What drafts that work on the target's hidden states are told of them (``draftwood.features``).

The forward writes the feature of each row beside its key and value, ``move`` moves them together, and a page that is
shared, cached or evicted carries them along. So those of a session's first ``cached`` positions are always there: of a
prompt that others had computed, too, and for a draft that joins late. Each draft is told each position once:
``AttachedDraft.featured`` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftwood.features import FeatureRequest, Features
from draftwood.runtime.model import ModelRuntime
from draftwood.wire import FeatureChunk, SessionCommit
from verifier_service.session import AttachedDraft

CHUNK_BYTES = 1 << 20
"""Most features in one chunk or commit."""


@dataclass(frozen=True, slots=True)
class DueFeatures:
    """A draft that lacks features of a session that has ``cached`` positions computed."""

    link: int
    draft: AttachedDraft
    request: FeatureRequest
    pages: Sequence[int]
    cached: int


def tell(
    due: Sequence[DueFeatures],
    runtime: ModelRuntime,
    commits: Mapping[int, list[SessionCommit]],
    chunks: dict[int, list[FeatureChunk]],
) -> None:
    """Adds to the commits, both by link, the features of the positions before the anchor, one for each token; what lies
    before them becomes chunks. Waits for the device."""
    found = runtime.read_features([(d.pages, d.draft.featured, d.cached) for d in due])
    place = {(link, commit.handle): k for link, listed in commits.items() for k, commit in enumerate(listed)}
    for d, kept in zip(due, found, strict=True):
        states, at = pick(kept, runtime, d.request), place.get((d.link, d.draft.handle))
        if at is not None:
            commit = commits[d.link][at]
            states, own = split(states, len(commit.tokens), d.request)
            commits[d.link][at] = replace(commit, feature_count=len(own), features=own.tobytes())
        if len(states):
            chunks.setdefault(d.link, []).extend(cut(d.draft.handle, d.draft.featured, states, d.request))
        d.draft.featured = d.cached


def pick(states: Features, runtime: ModelRuntime, request: FeatureRequest) -> Features:
    """Of the layers that are kept, those asked for, in the order asked for."""
    assert runtime.features is not None
    return states[:, [runtime.features.layers.index(layer) for layer in request.layers]]


def split(states: Features, tokens: int, request: FeatureRequest) -> tuple[Features, Features]:
    """What goes ahead in chunks, and what a commit of so many tokens carries."""
    at = len(states) - min(tokens, len(states), CHUNK_BYTES // request.position_bytes)
    return states[:at], states[at:]


def cut(handle: int, first: int, states: Features, request: FeatureRequest) -> list[FeatureChunk]:
    """Chunks of the positions from ``first`` on."""
    most = max(1, CHUNK_BYTES // request.position_bytes)
    return [
        FeatureChunk(handle, first + k, len(part), part.tobytes())
        for k in range(0, len(states), most)
        if len(part := states[k : k + most])
    ]
