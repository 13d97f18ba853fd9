"""Tiny models, made once, and a stack of real servers for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.services.heads import make_eagle, make_medusa
from tests.services.models import Models, make_models
from tests.services.stack import Stack, running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


LAYOUTS = ("eagle", "eagle3", "mtp", "block")


@pytest.fixture(scope="session")
def heads(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of heads for the deep target, by layout."""
    root, threads = tmp_path_factory.mktemp("heads"), torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models: a second one only waits
    made = {layout: make_eagle(root / layout, models.deep_target, layout) for layout in LAYOUTS}
    made["medusa"] = make_medusa(root / "medusa", models.deep_target)
    torch.set_num_threads(threads)
    return made


@pytest.fixture
async def stack(models: Models) -> AsyncIterator[Stack]:
    async with running(models) as stack:
        yield stack
