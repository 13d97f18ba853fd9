"""Actors with TLS on a local Ray: what they are told is where their secrets are."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from draftwood.client import DraftwoodClient, Finished
from draftwood.config import (
    ClientSettings,
    ClusterConfig,
    DraftPool,
    DraftSettings,
    RaySettings,
    RouterSection,
    RouterSettings,
    VerifierPool,
    VerifierSettings,
)
from draftwood.errors import Unauthenticated
from router.cluster import Cluster
from tests.router.test_pools import SERVERS
from tests.services.authority import Authority, new_token, token_entry, write_clients


@pytest.mark.ray
async def test_actors_are_secured_by_files_that_they_read_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])))
    token = new_token()
    authority = Authority(tmp_path / "ca")
    clients = write_clients(tmp_path / "clients.yaml", {"name": "a", "role": "admin", "tokens": [token_entry(token)]})
    settings = {role: authority.server(role) for role in ("router", "verifier", "draft")}
    router = RouterSettings(reconnect_s=0.1, clients=clients, client_certificates=False, **settings["router"])
    config = ClusterConfig(
        name="secured",
        ray=RaySettings(),
        router=RouterSection(settings=router),
        verifiers=[VerifierPool(settings=VerifierSettings(name="scripted", **settings["verifier"]))],
        drafts=[DraftPool(settings=DraftSettings(**settings["draft"]))],
    )
    cluster = Cluster(config, SERVERS)
    try:
        address = await cluster.start()
        await cluster.wait_ready(60)
        async with DraftwoodClient(address, settings=ClientSettings(ca=authority.ca, token=token)) as client:
            events = [event async for event in client.generate("hi", max_tokens=5)]
            state = await client.status()
        assert isinstance(events[-1], Finished) and events[-1].usage.completion_tokens == 5
        assert [worker.health for worker in (*state.verifiers, *state.drafts)] == ["ready", "ready"]
        async with DraftwoodClient(address, settings=ClientSettings(ca=authority.ca)) as stranger:
            with pytest.raises(Unauthenticated, match="CREDENTIALS_MISSING"):
                await stranger.models()
        told = pickle.dumps(cluster._plan)
        plan = pickle.loads(told).config
        for role, section in (("router", plan.router), ("verifier", plan.verifiers[0]), ("draft", plan.drafts[0])):
            assert section.settings.tls_key == settings[role]["tls_key"]
        assert b"PRIVATE KEY" not in told and token.encode() not in told
    finally:
        await cluster.stop(0.5)
