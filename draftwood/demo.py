"""``draftwood demo``: a cluster of four on this machine, and the promise checked token by token.

Each prompt is answered with drafts and then, at once, without, so that a drift of the machine hits both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from draftwood.client import Chunk, DraftwoodClient, Finished, Message, Usage
from draftwood.config import ClusterConfig
from draftwood.console import show_chunk, watch_start
from draftwood.errors import Internal

PROMPTS = (
    "Why is the sky blue?",
    "Write a short thank-you note to a colleague who helped me move house.",
    "Give me three tips for falling asleep more easily.",
    "What is the difference between a crocodile and an alligator?",
    "Explain to a ten-year-old how a bicycle stays upright.",
    "List five things to pack for a weekend in the mountains.",
    "Write a Python function that reverses a string.",
    "How do I make a simple tomato sauce for pasta?",
)
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One answer as it came."""

    tokens: tuple[int, ...]
    usage: Usage

    @property
    def decode_s(self) -> float:
        """From the first token to the last: the prompt's own forward is the same either way."""
        return self.usage.total_s - self.usage.first_token_s


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered with drafts and by the target alone."""

    prompt: str
    speculative: Run
    plain: Run

    @property
    def identical(self) -> bool:
        return self.speculative.tokens == self.plain.tokens


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the demo shows."""

    identical: bool
    speedup: float  # decode time of the target alone over that with drafts
    accepted: float  # mean tokens of a verify step

    def __str__(self) -> str:
        same = "yes" if self.identical else "no"
        return f"demo: identical={same} speedup={self.speedup:.2f}x accepted={self.accepted:.2f}"


async def run_demo(console: Console, config: ClusterConfig, max_tokens: int, timeout_s: float) -> bool:
    """Starts, compares, stops, reports; whether every token was the same. Raises DraftwoodError."""
    pairs = await _on_cluster(console, config, max_tokens, timeout_s)
    verdict = judge(pairs)
    console.print(pair_table(pairs))
    print(verdict, file=console.file, flush=True)
    return verdict.identical


def judge(pairs: Sequence[Pair]) -> Verdict:
    speculative = [pair.speculative for pair in pairs]
    spent_s = sum(run.decode_s for run in speculative)
    steps = sum(run.usage.steps for run in speculative)
    return Verdict(
        identical=all(pair.identical for pair in pairs),
        speedup=sum(pair.plain.decode_s for pair in pairs) / spent_s if spent_s else 0.0,
        accepted=sum(len(run.tokens) for run in speculative) / steps if steps else 0.0,
    )


def pair_table(pairs: Sequence[Pair]) -> Table:
    table = Table(title="with drafts against the target alone", title_justify="left")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=30)
    for column in ("tokens", "accepted", "tok/s", "plain", "same"):
        table.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    for pair in pairs:
        table.add_row(
            pair.prompt,
            str(len(pair.speculative.tokens)),
            f"{pair.speculative.usage.accepted_length:.2f}",
            f"{_rate(pair.speculative):.1f}",
            f"{_rate(pair.plain):.1f}",
            "[green]yes[/]" if pair.identical else "[red]no[/]",
        )
    return table


async def compare(console: Console, client: DraftwoodClient, max_tokens: int) -> list[Pair]:
    """The prompts one by one, with drafts (shown as it comes) and without, after a warm-up of each kind."""
    for speculate in (True, False):
        await _answer(None, client, "Say hello.", WARM_UP_TOKENS, speculate)
    pairs = []
    for number, prompt in enumerate(PROMPTS, 1):
        console.print(f"\n{number}. {prompt}", style="bold", highlight=False, markup=False)
        speculative = await _answer(console, client, prompt, max_tokens, True)
        console.print()
        pairs.append(Pair(prompt, speculative, await _answer(None, client, prompt, max_tokens, False)))
    console.print()
    return pairs


async def _on_cluster(console: Console, config: ClusterConfig, max_tokens: int, timeout_s: float) -> list[Pair]:
    from router.cluster import Cluster

    cluster = Cluster(config)
    try:
        await watch_start(console, cluster, config, timeout_s)
        async with DraftwoodClient(*cluster.address.split(",")) as client:
            return await compare(console, client, max_tokens)
    finally:
        await cluster.stop()


async def _answer(
    console: Console | None, client: DraftwoodClient, prompt: str, max_tokens: int, speculate: bool
) -> Run:
    tokens: list[int] = []
    async for event in client.generate([Message("user", prompt)], max_tokens=max_tokens, speculate=speculate):
        if isinstance(event, Chunk):
            tokens += event.tokens
            if console:
                show_chunk(console, event)
        elif isinstance(event, Finished):
            return Run(tuple(tokens), event.usage)
    raise Internal("NO_END", f"the answer to {prompt!r} ended without its last word")


def _rate(run: Run) -> float:
    return (len(run.tokens) - 1) / run.decode_s if run.decode_s > 0 else 0.0
