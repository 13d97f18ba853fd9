"""The topology that a draft worker's settings name."""

from __future__ import annotations

from draftwood.config import DraftSettings
from draftwood.topology import BestFirst, ExpandRerank, Fixed, Sequoia, Topology


def best_first(settings: DraftSettings) -> BestFirst:
    return BestFirst(
        settings.branch, settings.beam, settings.depth, settings.nodes_per_level, settings.min_level_survival
    )


def make_topology(settings: DraftSettings) -> Topology:
    if (shape := settings.shape()) is not None:
        return Fixed(shape)
    if settings.topology == "sequoia":
        return Sequoia(settings.branch, settings.depth, settings.max_nodes, settings.step_ms)
    if settings.topology == "expand_rerank":
        return ExpandRerank(settings.branch, settings.beam, settings.depth)
    return best_first(settings)
