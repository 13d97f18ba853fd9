"""Every setting of every role, declared once: type, unit, default and meaning.

The services take these models as they are, the command line and the YAML file of ``draftwood up`` are read into
them, and nothing else reads the environment. Each role also reads ``DRAFTWOOD_<ROLE>_<FIELD>`` variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from draftwood.errors import InvalidArgument

Positive = Annotated[int, Field(gt=0)]
Listen = Annotated[str, Field(description="host:port to listen on; port 0 picks a free one")]
Device = Annotated[str, Field(description='torch device, or "auto": the first CUDA GPU if there is one, else the CPU')]
DType = Annotated[
    Literal["auto", "float64", "float32", "bfloat16", "float16"],
    Field(description='"auto": float32 on the CPU, bfloat16 on a GPU'),
]
Threads = Annotated[int, Field(ge=0, description="CPU threads of one forward; 0: as many as there are cores")]


MetricsPort = Annotated[int, Field(ge=0, lt=2**16, description="port of Prometheus metrics on loopback; 0: none")]


class VerifierSettings(BaseSettings):
    """One verifier: the target model, its KV cache, and how it batches."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_VERIFIER_", extra="forbid")

    listen: Listen = "127.0.0.1:0"
    metrics_port: MetricsPort = 0
    model: str = Field("demo", description='target model: path, hub id, or "demo" (SmolLM2-135M-Instruct)')
    name: str = Field("", description="name that requests use; empty: derived from `model`")
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    page_tokens: Literal[16, 32, 64] = Field(64, description="tokens a KV page holds; also the kernel's key tile")
    kv_pages: Positive = Field(512, description="pages of the KV cache")
    prefix_cache: bool = Field(True, description="texts that begin alike share the full pages of their beginning")
    max_sessions: Positive = Field(64, description="sessions that may run at once")
    max_waiting: int = Field(256, ge=0, description="requests that may wait for pages or a session")
    max_nodes: Positive = Field(64, description="nodes of one session that one step may verify", le=255)
    max_depth: Positive = Field(32, description="depth of a tree, in nodes")
    max_live_nodes: Positive = Field(512, description="nodes kept of one session's trees between steps")
    max_step_tokens: int = Field(256, ge=2, description="rows of one forward; longer prompts are prefilled in chunks")
    max_context_tokens: Positive = Field(8192, description="longest sequence served; the model's own limit holds too")
    width: Literal["adaptive", "full"] = Field(
        "adaptive", description='nodes verified: "adaptive" those that pay, "full" all up to max_nodes (for measuring)'
    )
    max_step_nodes: int = Field(
        0, ge=0, description="nodes of one step, shared evenly by the running sessions; 0: `width` alone decides"
    )
    rule: Literal["shared_noise", "rejection", "typical"] = Field(
        "shared_noise", description="how guesses are accepted at a temperature above 0 if the request does not say"
    )
    typical_epsilon: float = Field(
        0.3, gt=0, le=1, description="typical acceptance: a guess of at least this probability is taken"
    )
    typical_delta: float = Field(
        0.09, gt=0, description="typical acceptance: so is one above this times exp(-entropy of the target)"
    )
    canary: bool = Field(True, description="each draft worker is tried on a known text, computed at start, as it joins")
    draft_wait_ms: float = Field(150.0, ge=0, description="longest wait of a step for a draft, milliseconds")
    load_interval_s: float = Field(1.0, gt=0, description="seconds between two load reports")


class DraftSettings(BaseSettings):
    """One draft worker: what it drafts with and how its trees grow."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_DRAFT_", extra="forbid")

    listen: Listen = "127.0.0.1:0"
    metrics_port: MetricsPort = 0
    kind: Literal["lm", "ngram"] = Field("lm", description="small language model, or n-gram lookup without weights")
    model: str = Field("demo", description='draft model (kind lm): path, hub id, or "demo" (7.7 M parameters)')
    tokenizer: str = Field("", description="where the draft's tokenizer is; empty: beside its model")
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    page_tokens: Literal[16, 32, 64] = Field(64, description="tokens a KV page holds")
    kv_pages: Positive = Field(512, description="pages of the KV cache")
    max_sessions: Positive = Field(64, description="sessions that may be attached at once")
    max_nodes: Positive = Field(64, description="nodes of one round", le=255)
    beam: Positive = Field(6, description="most nodes of a level that are expanded; half the round's budget holds too")
    branch: Positive = Field(4, description="children drawn per expanded node")
    depth: Positive = Field(8, description="levels of a round")
    nodes_per_level: int = Field(
        3,
        ge=0,
        description="a round has a level below the anchor's children for so many nodes of its budget; 0: `depth`",
    )
    min_level_survival: float = Field(
        0.15, ge=0, description="a level is drawn if its nodes together are reached with at least this probability"
    )
    q_top_k: Positive = Field(64, description="tokens that children are sampled from, under the rejection rule")
    q_top_p: float = Field(0.98, gt=0, le=1, description="least probability that these tokens cover, if q_top_k allows")
    lookahead_levels: int = Field(2, ge=0, description="levels grown while the verifier works on the round")
    max_step_tokens: Positive = Field(256, description="rows of one forward; longer prompts are prefilled in chunks")
    ngram_max: Positive = Field(5, description="longest context matched by the n-gram lookup, tokens")
    ngram_min: Positive = Field(2, description="shortest context matched by the n-gram lookup, tokens")
    load_interval_s: float = Field(1.0, gt=0, description="seconds between two load reports")


class RouterSettings(BaseSettings):
    """The router: where the pools are and how much it admits."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_ROUTER_", extra="forbid")

    listen: Listen = "127.0.0.1:0"
    metrics_port: MetricsPort = 0
    verifiers: list[str] = Field([], description="addresses of verifiers, besides those that register")
    drafts: list[str] = Field([], description="addresses of draft workers, besides those that register")
    drafts_per_session: int = Field(2, ge=0, description="draft workers attached to one session")
    max_requests: Positive = Field(256, description="requests served at once; one for n texts counts n times")
    max_choices: Positive = Field(16, description="most texts that one request may ask for (n)")
    reconnect_s: float = Field(0.5, gt=0, description="seconds between two attempts to reach a lost worker")
    migrate_wait_s: float = Field(30.0, ge=0, description="longest wait for a verifier when a session's own has died")
    status_interval_s: float = Field(1.0, gt=0, description="seconds between two messages of WatchStatus")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ActorSettings(_Section):
    """Where Ray places one actor."""

    num_cpus: float = Field(0.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    resources: dict[str, float] = Field({}, description="custom resources that the actor needs")
    label_selector: dict[str, str] = Field({}, description="node labels that the actor needs")


class VerifierPool(_Section):
    count: int = Field(1, ge=0)
    actor: ActorSettings = ActorSettings()
    settings: VerifierSettings = Field(default_factory=VerifierSettings)


class DraftPool(_Section):
    count: int = Field(1, ge=0)
    actor: ActorSettings = ActorSettings()
    settings: DraftSettings = Field(default_factory=DraftSettings)


class RouterSection(_Section):
    actor: ActorSettings = ActorSettings()
    settings: RouterSettings = Field(default_factory=RouterSettings)


class RaySettings(_Section):
    """The Ray cluster to run on."""

    address: str = Field("", description='address of a running cluster ("auto" finds it); empty: start a local one')
    namespace: str = "draftwood"
    num_cpus: Positive = Field(2, description="CPUs of a cluster started here")
    object_store_mib: int = Field(80, ge=80, description="object store of a cluster started here, MiB")


class ClusterConfig(_Section):
    """The YAML file of ``draftwood up``."""

    name: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]*$", description="name that status and down use")
    ray: RaySettings = RaySettings()
    router: RouterSection = RouterSection()
    verifiers: list[VerifierPool] = Field(default_factory=lambda: [VerifierPool()])
    drafts: list[DraftPool] = Field(default_factory=lambda: [DraftPool()])


def load_cluster_config(path: Path) -> ClusterConfig:
    """Reads and checks a cluster file; raises InvalidArgument CONFIG that names file, field and value."""
    try:
        data: Any = yaml.safe_load(path.read_text())
        return ClusterConfig.model_validate(data or {})
    except (OSError, yaml.YAMLError) as error:
        raise InvalidArgument("CONFIG", f"cannot read {path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument(
            "CONFIG", f"{path}: {first['msg']} (value: {first.get('input')!r})", field=field
        ) from error
