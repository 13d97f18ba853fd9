"""Tiny models, made once, and a stack of real servers for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.services.models import Models, make_models
from tests.services.stack import Stack, running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
async def stack(models: Models) -> AsyncIterator[Stack]:
    async with running(models) as stack:
        yield stack
