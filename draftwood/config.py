"""Every setting of every role, declared once: type, unit, default and meaning.

The services take these models as they are, the command line and the YAML file of ``draftwood up`` are read into
them, and nothing else reads the environment. Each role also reads ``DRAFTWOOD_<ROLE>_<FIELD>`` variables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from draftwood.errors import InvalidArgument
from draftwood.topology import EAGLE1, chain, from_choices, kary
from draftwood.tree import TokenTree, depths

Positive = Annotated[int, Field(gt=0)]
Listen = Annotated[str, Field(description="host:port to listen on; port 0 picks a free one")]
Device = Annotated[str, Field(description='torch device, or "auto": the first CUDA GPU if there is one, else the CPU')]
DType = Annotated[
    Literal["auto", "float64", "float32", "bfloat16", "float16"],
    Field(description='"auto": float32 on the CPU, bfloat16 on a GPU'),
]
Parts = Annotated[
    list[dict[str, Any]],
    Field(description="kind merged: settings of each drafter, at least its `kind`; the rest is as this worker's own"),
]
OF_TOPOLOGY = {
    "branch": ("best_first", "expand_rerank", "sequoia"),
    "nodes_per_level": ("best_first",),
    "branching": ("kary",),
    "choices": ("choices",),
    "step_ms": ("sequoia",),
}
"""Settings that only some topologies have a use for."""
MOST_CHILDREN = 64
FEWEST_LOOKS = 4
"""At the load within the window after which a pool shrinks."""
HEAD_KINDS = ("eagle", "mtp", "medusa", "block")
"""Kinds that work on the target's features (``draftwood.features``)."""
MOST_MTP_DEPTH = 3
PART_KINDS = ("lm", *HEAD_KINDS, "ngram", "suffix", "bridged")
"""Kinds that can be parts of kind merged."""
PageTokens = Annotated[
    Literal[16, 32, 64], BeforeValidator(lambda value: int(value) if str(value).isdecimal() else value)
]
"""Variables and the command line give it as text."""
Threads = Annotated[int, Field(ge=0, description="CPU threads of one forward; 0: as many as there are cores")]


def _anywhere(path: Path) -> Path:
    """Holds for processes that run in other folders, too."""
    return path.expanduser().absolute()


File = Annotated[Path, AfterValidator(_anywhere)]


MetricsHost = Annotated[str, Field(description="address that Prometheus metrics are served on")]
MetricsPort = Annotated[
    int, Field(ge=0, lt=2**16, description="their port; if it is taken, the next of 16 that is free; 0: none")
]
Traces = Annotated[
    str, Field(description="OTLP endpoint (gRPC) that traces are sent to, as http://127.0.0.1:4317; empty: none")
]


class ServerSettings(BaseSettings):
    """What every role has: how it proves itself to others, and they to it. docs/security.md tells how to set it up."""

    tls_cert: File | None = Field(None, description="certificate (chain, PEM) that names the role; without: no TLS")
    tls_key: File | None = Field(None, description="its private key (PEM, not encrypted)")
    tls_ca: File | None = Field(None, description="CA certificates (PEM) that those of other processes must come from")
    insecure: bool = Field(False, description="allow `listen` to be other than loopback without TLS")


class VerifierSettings(ServerSettings):
    """One verifier: the target model, its KV cache, and how it batches."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_VERIFIER_", extra="forbid")

    listen: Listen = "127.0.0.1:0"
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = 0
    traces: Traces = ""
    vllm_metrics: bool = Field(False, description="metrics that mean what vLLM's do have its names, too")
    model: str = Field("demo", description='target model: path, hub id, or "demo" (SmolLM2-135M-Instruct)')
    name: str = Field("", description="name that requests use; empty: derived from `model`")
    device: Device = "auto"
    dtype: DType = "auto"
    threads: Threads = 0
    page_tokens: PageTokens = Field(64, description="tokens a KV page holds; also the kernel's key tile")
    kv_pages: Positive = Field(512, description="pages of the KV cache")
    prefix_cache: bool = Field(True, description="texts that begin alike share the full pages of their beginning")
    features: list[Annotated[int, Field(ge=0)]] = Field(
        [], description="layers whose hidden states drafts may ask for (docs/drafters.md); empty: features are off"
    )
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


class DraftSettings(ServerSettings):
    """One draft worker: what it drafts with and how its trees grow."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_DRAFT_", extra="forbid")

    listen: Listen = "127.0.0.1:0"
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = 0
    traces: Traces = ""
    kind: Literal["lm", "eagle", "mtp", "medusa", "block", "ngram", "suffix", "bridged", "merged"] = Field(
        "lm",
        description="lm: small language model; eagle, mtp, medusa, block: heads on the target's hidden states; ngram: "
        "lookup in the text itself; suffix: lookup in all texts written here; bridged: small language model of "
        "another tokenizer; merged: several of them (`parts`)",
    )
    parts: Parts = []
    model: str = Field("demo", description='draft model or head: path, hub id, or "demo" (kind lm, 7.7 M parameters)')
    target: str = Field("demo", description="model that a head is made for, for its embedding and LM head: as `model`")
    target_name: str = Field("", description="name of the only target that a head serves; empty: any of its sizes")
    tokenizer: str = Field("", description="where the draft's tokenizer is; empty: beside its model")
    target_tokenizer: str = Field(
        "", description='kind bridged: where the tokenizer of the target is: path, hub id, or "demo"'
    )
    device: Device = "auto"
    dtype: DType = Field(
        "auto",
        description='"auto": bfloat16 on a GPU; on a CPU float32, for kind lm bfloat16 if the CPU computes in it',
    )
    threads: Threads = 0
    page_tokens: PageTokens = Field(64, description="tokens a KV page holds")
    kv_pages: Positive = Field(512, description="pages of the KV cache")
    max_sessions: Positive = Field(64, description="sessions that may be attached at once")
    max_nodes: Positive = Field(64, description="nodes of one round", le=255)
    topology: Literal["best_first", "expand_rerank", "sequoia", "chain", "kary", "choices", "eagle1"] = Field(
        "best_first", description="shape of the trees of kind lm (docs/drafters.md)"
    )
    branching: list[Positive] = Field([], description="topology kary: children of each node, by depth")
    choices: list[list[int]] = Field([], description="topology choices: each node as the ranks on its path")
    step_ms: list[tuple[Positive, Annotated[float, Field(gt=0)]]] = Field(
        [],
        description="topology sequoia: rows of a step and its milliseconds, two points or more; empty: the verifier's",
    )
    beam: Positive = Field(6, description="most nodes of a level that are expanded; half the round's budget holds too")
    branch: Positive = Field(4, le=MOST_CHILDREN, description="children drawn per expanded node")
    depth: Positive = Field(8, description="levels of a round")
    greedy_temperature: float = Field(
        1.0,
        gt=0,
        le=4,
        description="temperature that a model or layer is read at where the target takes its likeliest token",
    )
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
    suffix_max: Positive = Field(16, description="longest context matched by the suffix index, tokens")
    suffix_min: Positive = Field(3, description="shortest context matched by the suffix index, tokens")
    suffix_tokens: int = Field(
        1_000_000,
        ge=0,
        description="tokens of ended texts in the suffix index, 20 bytes each; the oldest are forgotten",
    )
    load_interval_s: float = Field(1.0, gt=0, description="seconds between two load reports")

    @model_validator(mode="after")
    def _fits(self) -> DraftSettings:
        """Refuses what the topology or kind has no use for, and shapes beyond the caps."""
        for name, topologies in OF_TOPOLOGY.items():
            if name in self.model_fields_set and self.topology not in topologies:
                raise ValueError(f"{name} is of topology {' or '.join(topologies)}, not of {self.topology}")
        for shortest, longest in (("ngram_min", "ngram_max"), ("suffix_min", "suffix_max")):
            if getattr(self, shortest) > getattr(self, longest):
                raise ValueError(
                    f"{shortest} is {getattr(self, shortest)}, the limit is {longest} = {getattr(self, longest)}"
                )
        if self.kind == "mtp" and (self.topology != "chain" or self.depth > MOST_MTP_DEPTH):
            asked = f"topology {self.topology} of depth {self.depth}"
            raise ValueError(f"kind mtp draws a chain of 1 to {MOST_MTP_DEPTH} nodes, got {asked}")
        rows = [at for at, _ in self.step_ms]
        if len(rows) == 1 or rows != sorted(set(rows)):
            raise ValueError(f"step_ms needs two points or more with rows ascending, got rows {rows}")
        if self.kind == "bridged" and not self.target_tokenizer:
            raise ValueError("kind bridged needs target_tokenizer")
        if self.kind not in ("bridged", "merged") and self.target_tokenizer:
            raise ValueError(f"target_tokenizer is of kind bridged, not of {self.kind}")
        self._check_shape()
        self.part_settings()
        return self

    def _check_shape(self) -> None:
        shape = self.shape()
        if shape is None:
            return
        figures = (
            ("nodes", shape.size - 1, "max_nodes", self.max_nodes),
            ("levels", int(depths(shape).max()), "depth", self.depth),
            ("children of one node", int(shape.token.max()) + 1, "the most of a node", MOST_CHILDREN),
        )
        for what, value, name, limit in figures:
            if value > limit:
                raise ValueError(f"topology {self.topology} has {value} {what}, the limit is {limit} ({name})")

    def shape(self) -> TokenTree | None:
        """The fixed shape that the topology names, None for those that have none; raises ValueError if it is none."""
        if self.topology == "chain":
            return chain(min(self.depth, self.max_nodes))
        if self.topology == "kary":
            if not self.branching:
                raise ValueError("topology kary needs branching, as in [4, 2, 1]")
            return kary(self.branching, self.max_nodes)
        if self.topology == "choices":
            if not self.choices:
                raise ValueError("topology choices needs choices, as in [[0], [1], [0, 0]]")
            return from_choices(self.choices)
        return from_choices(EAGLE1) if self.topology == "eagle1" else None

    def part_settings(self) -> list[DraftSettings]:
        """Settings of each drafter of kind merged; raises ValueError, of which pydantic's is one."""
        if self.kind != "merged":
            if self.parts:
                raise ValueError(f"parts is of kind merged, not of {self.kind}")
            return []
        if len(self.parts) < 2:
            raise ValueError(f"kind merged needs 2 parts or more, got {len(self.parts)}")
        own = self.model_dump(exclude_unset=True, exclude={"kind", "parts"})
        for part in self.parts:
            if part.get("kind") not in PART_KINDS:
                raise ValueError(f"a part's kind is {', '.join(PART_KINDS)}, got {part.get('kind')!r}")
        return [DraftSettings(**({"parts": []} | own | part)) for part in self.parts]


class WidthPolicySettings(BaseModel):
    """The router's caps on the trees of its verifiers (docs/architecture.md)."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["off", "dry_run", "on"] = Field("on", description='"dry_run" decides and tells, but sends nothing')
    look_s: float = Field(1.0, gt=0, description="seconds between two looks at the load")
    narrow_s: float = Field(3.0, ge=0, description="seconds that a cap does not get narrower again after a change")
    widen_s: float = Field(5.0, gt=0, description="seconds of ease after which a cap is lifted by a rung")
    min_nodes: int = Field(2, ge=1, le=32, description="nodes of a session that are left in any case")
    queue_wait_ms: float = Field(500.0, gt=0, description="longest wait of a request for pages or a session, ms")
    step_ms: float = Field(0.0, ge=0, description="mean time of a step, ms; 0: does not matter")
    draft_busy: float = Field(0.9, gt=0, le=1, description="share of time that draft workers of several sessions draft")


class RouterSettings(ServerSettings):
    """The router: where the pools are and how much it admits."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_ROUTER_", extra="forbid")

    listen: Listen = "127.0.0.1:0"
    metrics_host: MetricsHost = "127.0.0.1"
    metrics_port: MetricsPort = 0
    traces: Traces = ""
    verifiers: list[str] = Field([], description="addresses of verifiers, besides those that register")
    drafts: list[str] = Field([], description="addresses of draft workers, besides those that register")
    drafts_per_session: int = Field(2, ge=0, description="draft workers attached to one session")
    max_requests: Positive = Field(256, description="requests served at once; one for n texts counts n times")
    max_choices: Positive = Field(16, description="most texts that one request may ask for (n)")
    reconnect_s: float = Field(0.5, gt=0, description="seconds between two attempts to reach a lost worker")
    lease_s: float = Field(
        15.0, gt=0, description="silence after which a worker counts as lost; workers tell their load every second"
    )
    migrate_wait_s: float = Field(30.0, ge=0, description="longest wait for a verifier when a session's own has died")
    status_interval_s: float = Field(1.0, gt=0, description="seconds between two messages of WatchStatus")
    width_policy: WidthPolicySettings = WidthPolicySettings()
    clients: File | None = Field(None, description="file of clients: their tokens' hashes and their limits")
    client_certificates: bool = Field(
        True, description="with TLS: whoever connects must show a certificate; false: tokens alone (needs `clients`)"
    )


class ClientSettings(BaseSettings):
    """How the client library and the command line reach a router; each also as a variable, as in ``DRAFTWOOD_CA``."""

    model_config = SettingsConfigDict(env_prefix="DRAFTWOOD_", extra="forbid")

    tls: bool = Field(False, description="TLS with the public CAs that gRPC knows; `ca` and `cert` imply TLS")
    ca: File | None = Field(None, description="CA certificates (PEM) that the router's must come from")
    cert: File | None = Field(None, description="own certificate (chain, PEM)")
    key: File | None = Field(None, description="its private key (PEM, not encrypted)")
    server_name: str = Field("", description="name in the router's certificate; empty: the host of its address")
    token_file: File | None = Field(None, description="file with the bearer token, reread when it changes")
    token: SecretStr | None = Field(None, description="the bearer token itself; `token_file` is the better way")


def load_client_settings(**given: Any) -> ClientSettings:
    """What is given, and the environment for the rest; None is not given. Raises InvalidArgument CONFIG."""
    try:
        return ClientSettings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]  # the token may be among the values
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidArgument("CONFIG", f"connection to the router: {first['msg']}", field=field) from None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ActorSettings(_Section):
    """Where Ray places one actor."""

    num_cpus: float = Field(0.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    resources: dict[str, float] = Field({}, description="custom resources that the actor needs")
    label_selector: dict[str, str] = Field({}, description="node labels that the actor needs")


class Pool(_Section):
    """What all pools have: how many workers, at what cost, and where."""

    name: str = Field(
        "",
        pattern=r"^([a-z][a-z0-9-]*)?$",
        description="name for `scale` and `status`; empty: the role, with a number if it has several pools",
    )
    count: int = Field(1, ge=0, description="workers at the start")
    min: int = Field(0, ge=0, description="fewest workers that scaling leaves")
    max: int | None = Field(None, ge=0, description="most workers; left out: no limit but the budget")
    cost: float = Field(1.0, ge=0, description="what a worker counts against the budget")
    actor: ActorSettings = ActorSettings()

    @model_validator(mode="after")
    def _count_within_limits(self) -> Pool:
        most = self.count if self.max is None else self.max
        if not self.min <= self.count <= most:
            raise ValueError(f"count is {self.count}, but min is {self.min} and max is {self.max}")
        return self


class VerifierPool(Pool):
    settings: VerifierSettings = Field(default_factory=VerifierSettings)


class DraftPool(Pool):
    settings: DraftSettings = Field(default_factory=DraftSettings)


P = TypeVar("P", VerifierPool, DraftPool)


class RouterSection(_Section):
    """One router, or several side by side that all workers register with."""

    count: Positive = Field(
        1, description="routers; the second listens on the port after the first's, and so on; port 0: any free ones"
    )
    actor: ActorSettings = ActorSettings()
    settings: RouterSettings = Field(default_factory=RouterSettings)

    @model_validator(mode="after")
    def _ports_are_ports(self) -> RouterSection:
        self.each()
        return self

    def each(self) -> list[RouterSettings]:
        """Settings of each router. Raises ValueError if the last one's port is none."""
        host, _, port = self.settings.listen.rpartition(":")
        if self.count == 1 or port == "0" or not port.isdecimal():
            return [self.settings] * self.count
        last = int(port) + self.count - 1
        if last >= 2**16:
            raise ValueError(f"count is {self.count} from port {port} on, but the last port is {2**16 - 1}")
        ports = range(int(port), last + 1)
        return [self.settings.model_copy(update={"listen": f"{host}:{each}"}) for each in ports]


class RaySettings(_Section):
    """The Ray cluster to run on."""

    address: str = Field("", description='address of a running cluster ("auto" finds it); empty: start a local one')
    namespace: str = "draftwood"
    num_cpus: Positive = Field(2, description="CPUs of a cluster started here")
    autoscaler: bool = Field(False, description="the cluster has Ray's autoscaler: it is asked for the nodes needed")
    object_store_mib: int = Field(80, ge=80, description="object store of a cluster started here, MiB")


class AutoscalingSettings(_Section):
    """When the pools grow and shrink by themselves."""

    mode: Literal["off", "dry_run", "on"] = Field(
        "off", description='"dry_run" decides and tells, but changes nothing; "on" sets the sizes'
    )
    fast_s: float = Field(1.0, gt=0, description="seconds between two looks at the load; a pool grows after two")
    rest_s: float = Field(10.0, ge=0, description="seconds that a pool does not grow again after it has grown")
    slow_s: float = Field(15.0, gt=0, description="seconds that a pool does not shrink again after it has shrunk")
    down_window_s: float = Field(120.0, gt=0, description="seconds that fewer workers must have sufficed to shrink")
    queue_wait_ms: float = Field(500.0, gt=0, description="verifiers: longest wait for pages or a session, ms")
    step_ms: float = Field(0.0, ge=0, description="verifiers: time of a step, ms; 0: does not matter")
    narrow_share: float = Field(
        0.5, gt=0, le=1, description="verifiers: share of steps without drafts because there are too many sessions"
    )
    pages_held: float = Field(0.85, gt=0, le=1, description="verifiers: share of KV pages that sessions hold")
    draft_busy: float = Field(0.75, gt=0, le=1, description="draft workers: share of time that they draft")
    sessions: float = Field(0.85, gt=0, le=1, description="both: sessions over the most that may run")
    place_s: float = Field(
        20.0, gt=0, description="a worker that has not started by then has no node, unless Ray's autoscaler brings one"
    )

    @model_validator(mode="after")
    def _window_has_looks(self) -> AutoscalingSettings:
        if self.down_window_s < FEWEST_LOOKS * self.fast_s:
            least = f"{FEWEST_LOOKS} looks, {FEWEST_LOOKS * self.fast_s:g} s"
            raise ValueError(f"down_window_s is {self.down_window_s:g}, it must hold {least}, at least")
        return self


class ScalingSettings(_Section):
    """How the controller keeps the pools."""

    budget: float | None = Field(None, ge=0, description="most that all workers may cost together; left out: no limit")
    check_s: float = Field(0.5, gt=0, description="seconds between two looks at the workers")
    drain_s: float = Field(
        30.0, ge=0, description="longest that a verifier to be removed goes on with its sessions; the rest then moves"
    )
    replace_lost_s: float = Field(
        30.0, gt=0, description="a worker that was there and has been lost for so long is replaced by another"
    )
    auto: AutoscalingSettings = AutoscalingSettings()


class ClusterConfig(_Section):
    """The YAML file of ``draftwood up``."""

    name: str = Field("default", pattern=r"^[a-z0-9][a-z0-9-]*$", description="name that status and down use")
    ray: RaySettings = RaySettings()
    router: RouterSection = RouterSection()
    verifiers: list[VerifierPool] = Field(default_factory=lambda: [VerifierPool()])
    drafts: list[DraftPool] = Field(default_factory=lambda: [DraftPool()])
    scaling: ScalingSettings = ScalingSettings()

    @model_validator(mode="after")
    def _pools_have_names(self) -> ClusterConfig:
        self.verifiers = _named("verifier", self.verifiers)
        self.drafts = _named("draft", self.drafts)
        names = [pool.name for pool in self.pools]
        if double := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two pools have the name {double!r}")
        if taken := next((name for name in names if name in ("router", "controller")), None):
            raise ValueError(f"no pool may have the name {taken!r}")
        boundless = next((pool.name for pool in self.pools if pool.max is None), None)
        if self.scaling.auto.mode != "off" and self.scaling.budget is None and boundless:
            raise ValueError(f"scaling.auto is on, but pool {boundless!r} has no max and there is no scaling.budget")
        cost, budget = sum(pool.cost * pool.count for pool in self.pools), self.scaling.budget
        if budget is not None and cost > budget:
            raise ValueError(f"the pools cost {cost:g} at the start, but scaling.budget is {budget:g}")
        return self

    @property
    def pools(self) -> list[VerifierPool | DraftPool]:
        return [*self.verifiers, *self.drafts]


def _named(role: str, pools: list[P]) -> list[P]:
    if len(pools) == 1:
        return [pools[0].model_copy(update={"name": pools[0].name or role})]
    return [pool.model_copy(update={"name": pool.name or f"{role}-{k}"}) for k, pool in enumerate(pools)]


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
