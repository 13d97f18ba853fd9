"""What the command line shows: progress of a start, streamed tokens, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Literal, Protocol

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from draftwood.client import Chunk, ClusterState, DraftState, Finished, PoolState, Usage, VerifierState
from draftwood.config import ClusterConfig

Stage = Literal["starting", "loading", "ready", "lost"]
STAGES: tuple[Stage, ...] = ("lost", "starting", "loading", "ready")
STYLES = {"starting": "dim", "loading": "yellow", "ready": "green", "lost": "red", "draining": "yellow"}
ACCEPTED_STYLE = "cyan"


class StartView:
    """One line a role until all its workers are ready; a context manager.

    On a terminal the lines change in place, elsewhere each change is a line of its own.
    """

    def __init__(self, console: Console, totals: dict[str, int]) -> None:
        self._console = console
        self._workers: dict[str, dict[str, Stage]] = {role: {} for role, total in totals.items() if total}
        self._totals = totals
        self._shown: dict[str, str] = {}
        self._live = Live(console=console, transient=False) if console.is_terminal else None

    def __enter__(self) -> StartView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    @property
    def ready(self) -> bool:
        return all(self.stage(role) == "ready" for role in self._workers)

    def update(self, role: str, worker: str, stage: Stage) -> None:
        self._workers.setdefault(role, {})[worker] = stage
        self._show()

    def stage(self, role: str) -> Stage:
        """The least advanced stage of the role's workers; those not heard of are starting."""
        stages = list(self._workers[role].values())
        if len(stages) < self._totals.get(role, 0):
            stages.append("starting")
        return min(stages, key=STAGES.index)

    def _line(self, role: str) -> str:
        stage = self.stage(role)
        ready = list(self._workers[role].values()).count("ready")
        return f"{role:<9} [{STYLES[stage]}]{stage:<9}[/] {ready} of {self._totals.get(role, ready)}"

    def _show(self) -> None:
        lines = {role: self._line(role) for role in self._workers}
        if self._live:
            self._live.update("\n".join(lines.values()))
        else:
            for line in (line for role, line in lines.items() if self._shown.get(role) != line):
                self._console.print(line, highlight=False)
        self._shown = lines


class Step(Protocol):
    """How far one worker is; see ``router.controller.Progress``."""

    @property
    def role(self) -> str: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def stage(self) -> Stage: ...


class Startable(Protocol):
    """What starts here; see ``router.cluster.Cluster``."""

    async def start(self, progress: Callable[[Step], None]) -> str: ...

    async def wait_ready(self, timeout_s: float, progress: Callable[[Step], None]) -> None: ...


async def watch_start(console: Console, cluster: Startable, config: ClusterConfig, timeout_s: float) -> None:
    """Starts a cluster in this process and shows how far it is until all is ready. Raises DraftwoodError."""
    with StartView(console, worker_totals(config)) as view:

        def show(step: Step) -> None:
            view.update(step.role, step.worker_id, step.stage)

        await cluster.start(show)
        await cluster.wait_ready(timeout_s, show)


def worker_totals(config: ClusterConfig) -> dict[str, int]:
    """How many workers a cluster has, by role."""
    verifiers = sum(pool.count for pool in config.verifiers)
    drafts = sum(pool.count for pool in config.drafts)
    return {"router": config.router.count, "verifier": verifiers, "draft": drafts}


def show_chunk(console: Console, chunk: Chunk) -> None:
    """The chunk's text, accepted draft tokens in colour."""
    for index, piece in enumerate(chunk.pieces):
        style = ACCEPTED_STYLE if index < chunk.accepted else None
        console.print(piece, style=style, end="", markup=False, highlight=False, soft_wrap=True)


def logprob_table(chunks: Iterable[Chunk]) -> Table:
    """One row a token: what it added to the text, its log probability, the likeliest tokens at its place."""
    table = _table("log probabilities", "token", "text", "logprob", "likeliest")
    for chunk in chunks:
        for token, piece, logprobs in zip(chunk.tokens, chunk.pieces, chunk.logprobs, strict=True):
            top = "  ".join(f"{other.text!r} {other.logprob:.3f}" for other in logprobs.top)
            table.add_row(str(token), Text(repr(piece)), f"{logprobs.logprob:.3f}", Text(top))
    return table


def summary(finished: Finished) -> str:
    """What the text came to; a second line of what drafts did for it, if they sent anything."""
    usage = finished.usage
    by = "" if finished.stop is None else f" by {finished.stop!r}"
    return (
        f"{usage.completion_tokens} tokens ({finished.reason}{by}), {tokens_per_s(usage):.1f} tok/s, "
        f"{usage.accepted_length:.2f} tokens a step, first token after {usage.first_token_s * 1000:.0f} ms"
        + ("\n" + _draft_summary(usage) if usage.nodes_drafted else "")
    )


def _draft_summary(usage: Usage) -> str:
    accepted = (*usage.accepted_by_depth, *[0] * (len(usage.verified_by_depth) - len(usage.accepted_by_depth)))
    by_depth = ", ".join(f"{a}/{v}" for a, v in zip(accepted, usage.verified_by_depth, strict=True))
    return (
        f"drafts: {usage.nodes_drafted} nodes sent, {usage.nodes_verified} verified, {usage.nodes_accepted} accepted "
        f"(by depth {by_depth or 'none'}), {usage.nodes_stale} stale, {usage.late_rounds} rounds late; "
        f"{usage.mean_width:.1f} nodes a step (last: {usage.width_reason}), {usage.draft_wait_s:.2f} s waited"
    )


def tokens_per_s(usage: Usage) -> float:
    return usage.completion_tokens / usage.total_s if usage.total_s else 0.0


def status_tables(state: ClusterState) -> Iterable[Table | str]:
    if state.pools:
        yield pool_table(state.pools)
    yield _verifier_table(state.verifiers)
    yield from (f"{v.address} is capped to {v.cap}; {v.decision}" for v in state.verifiers if v.cap)
    yield _draft_table(state.drafts)
    yield (
        f"requests: {state.requests} running, {state.requests_total} in all, {state.requests_failed} failed; "
        f"repairs: {state.draft_reattachments} drafts re-attached, {state.verifier_migrations} verifiers replaced"
    )


def pool_table(pools: Iterable[PoolState]) -> Table:
    """What each pool is to be and is; the last column says what is wrong or was decided."""
    table = _table("pools", "pool", "role", "wanted", "ready", "leaving", "limits", "last")
    for p in pools:
        limits = f"{p.min} to {'any' if p.max is None else p.max}"
        last = Text(p.error, style="red") if p.error else Text(p.decision)
        table.add_row(p.name, p.role, str(p.wanted), f"{p.ready}/{p.present}", str(p.draining), limits, last)
    return table


def _verifier_table(verifiers: Iterable[VerifierState]) -> Table:
    table = _table("verifiers", "address", "health", "model", "device", "sessions", "pages free", "step", "width")
    for v in verifiers:
        sessions = f"{v.running}+{v.waiting}/{v.max_sessions}"
        pages = f"{v.free_pages}/{v.total_pages}"
        table.add_row(
            v.address, _health(v.health), v.model, v.device, sessions, pages, f"{v.step_ms:.1f} ms", f"{v.width:.1f}"
        )
    return table


def _draft_table(drafts: Iterable[DraftState]) -> Table:
    table = _table("drafts", "address", "health", "kind", "model", "sessions", "nodes", "round", "idle")
    for d in drafts:
        sessions = f"{d.sessions}/{d.max_sessions}"
        failed = f" [red]canary {d.canary or 0:.0%}[/]" if d.canary_failed else ""
        table.add_row(
            d.address,
            _health(d.health) + failed,
            d.kind,
            d.model,
            sessions,
            str(d.nodes_drafted),
            f"{d.round_ms:.1f} ms",
            f"{d.idle_share:.0%}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column not in ("model", "last"))
    return table


def _health(health: str) -> str:
    return f"[{STYLES.get(health, 'none')}]{health}[/]"
