"""The command line, as a user runs it, against a router with scripted workers."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rich.console import Console

from draftwood.choices import choice_seed
from draftwood.client import (
    Alternative,
    Chunk,
    ClusterState,
    DraftState,
    DraftwoodClient,
    Finished,
    TokenLogprobs,
    Usage,
)
from draftwood.config import load_cluster_config
from draftwood.console import StartView, logprob_table, show_chunk, status_tables, summary
from draftwood.demo import PROMPTS, Pair, Run, compare, judge, pair_table
from draftwood.v1 import draft_pb2, verifier_pb2
from router.scaling import PoolLimits, PoolState
from router.supervisor import ClusterRecord, is_running, read_record, state_path, write_record
from tests.router.harness import ScriptedCluster
from tests.router.scripted import scripted_text

EXAMPLES = Path(__file__).parents[1] / "deploy" / "examples"


@pytest.fixture
async def cluster() -> AsyncIterator[ScriptedCluster]:
    async with AsyncExitStack() as stack:
        yield ScriptedCluster(stack)


@dataclass
class Outcome:
    code: int | None
    out: str
    err: str


async def draftwood(*arguments: str, stdin: str = "", state: Path | None = None) -> Outcome:
    """Runs the console script in a process of its own."""
    environment = os.environ | {"XDG_STATE_HOME": str(state or "/nonexistent"), "COLUMNS": "200", "NO_COLOR": "1"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from draftwood.cli import main; main()",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 60)
    return Outcome(process.returncode, out.decode(), err.decode())


async def test_generate_streams_the_text_and_a_summary(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()])
    outcome = await draftwood("generate", "hi", "--address", cluster.address, "--max-tokens", "6", "--seed", "5")
    assert outcome.code == 0, outcome.err
    text, last = outcome.out.splitlines()
    assert [int(word) for word in text.split()] == scripted_text(5, 6)
    assert last.startswith("6 tokens (length), 60.0 tok/s, 1.00 tokens a step")


async def test_generate_sends_a_chat_or_raw_text(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    await draftwood("generate", "hi", "--address", cluster.address, "--max-tokens", "1")
    await draftwood("generate", "hi", "--address", cluster.address, "--max-tokens", "1", "--raw", "--no-speculate")
    chat, raw = (request.generation for request in verifier.log.requests)
    assert [(m.role, m.content) for m in chat.chat.messages] == [("user", "hi")] and not chat.speculation.disabled
    assert raw.text == "hi" and raw.speculation.disabled


async def test_generate_sends_what_ends_the_text(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    where = ("--address", cluster.address, "--max-tokens", "1")
    ending = ("--stop", "a b", "--stop", "c", "--stop-token-id", "7", "--include-stop")
    assert (await draftwood("generate", "hi", *where, *ending, "--ignore-eos", "--no-skip-special")).code == 0
    assert (await draftwood("generate", "hi", *where)).code == 0
    told, plain = (request.generation for request in verifier.log.requests)
    assert (list(told.stop), list(told.stop_token_ids)) == (["a b", "c"], [7])
    assert told.include_stop_str_in_output and told.ignore_eos and not told.skip_special_tokens
    assert not (plain.stop or plain.stop_token_ids or plain.include_stop_str_in_output or plain.ignore_eos)
    assert not plain.HasField("skip_special_tokens")


async def test_generate_shows_each_of_several_texts_with_its_seed(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()])
    where = ("--address", cluster.address, "--max-tokens", "4", "--seed", "5")
    outcome = await draftwood("generate", "hi", *where, "-n", "3", "--temperature", "1")
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    shown = {}
    for head, text, last in zip(lines[::3], lines[1::3], lines[2::3], strict=True):
        shown[head] = [int(word) for word in text.split()]
        assert last.startswith("4 tokens (length)")
    seeds = [choice_seed(5, k) for k in range(3)]
    assert shown == {f"text {k}, seed {seed}:": scripted_text(seed, 4) for k, seed in enumerate(seeds)}
    refused = await draftwood("generate", "hi", *where, "--n", "2")
    assert (refused.code, refused.out) == (1, "") and "CHOICES (generation.n)" in refused.err


async def test_generate_sends_the_sampling_parameters(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    options = (
        "--temperature 0.5 --top-k 3 --top-p 0.25 --min-p 0.125 --presence-penalty 0.5 --frequency-penalty -0.5 "
        "--repetition-penalty 1.5 --logit-bias 7=-2.5 --logit-bias 11=1 --bad-word sea --bad-word sky --min-tokens 1 "
        "--seed 9 --top-logprobs 2 --max-tokens 2"
    )
    outcome = await draftwood("generate", "hi", "--address", cluster.address, *options.split())
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("-0.500") == 2, "one line a token"
    (request,) = verifier.log.requests
    assert request.generation.sampling == verifier_pb2.Sampling(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, presence_penalty=0.5, frequency_penalty=-0.5,
        repetition_penalty=1.5, logit_bias={7: -2.5, 11: 1.0},
        bad_words=[verifier_pb2.BadWord(text="sea"), verifier_pb2.BadWord(text="sky")], min_tokens=1, seed=9,
        logprobs=True, top_logprobs=2,
    )  # fmt: skip


async def test_generate_sends_constraints(cluster: ScriptedCluster, tmp_path: Path) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    schema, grammar = tmp_path / "schema.json", tmp_path / "g.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "é"')
    for option in (["--json-schema", str(schema)], ["--regex", "a|b"], ["--grammar", str(grammar)], ["--json-object"]):
        outcome = await draftwood("generate", "hi", "--address", cluster.address, "--max-tokens", "1", *option)
        assert outcome.code == 0, outcome.err
    constraints = [request.generation.constraint for request in verifier.log.requests]
    assert constraints == [
        verifier_pb2.Constraint(json_schema='{"type": "object"}'),
        verifier_pb2.Constraint(regex="a|b"),
        verifier_pb2.Constraint(grammar='start: "é"'),
        verifier_pb2.Constraint(json_object=True),
    ]
    outcome = await draftwood("generate", "hi", "--address", cluster.address, "--json-schema", str(tmp_path / "none"))
    assert outcome.code == 2 and "--json-schema" in outcome.err


@pytest.mark.parametrize("bias", ["7", "7=", "x=1", "-7=1", "7=nan", "7=1=2"])
async def test_a_logit_bias_that_is_none_is_refused(bias: str) -> None:
    outcome = await draftwood("generate", "hi", "--address", "127.0.0.1:1", f"--logit-bias={bias}")
    assert outcome.code == 2 and "--logit-bias" in outcome.err and bias in outcome.err


@pytest.mark.parametrize("rule", ["shared_noise", "rejection", "typical", "greedy", ""])
async def test_generate_sends_the_rule(cluster: ScriptedCluster, rule: str) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    option = ["--rule", rule] if rule else []
    outcome = await draftwood("generate", "hi", "--address", cluster.address, "--max-tokens", "1", *option)
    assert outcome.code == 0, outcome.err
    want = getattr(draft_pb2, f"RULE_{rule.upper() or 'UNSPECIFIED'}")
    assert [request.generation.speculation.rule for request in verifier.log.requests] == [want]


async def test_a_rule_that_is_none_is_refused() -> None:
    outcome = await draftwood("generate", "hi", "--address", "127.0.0.1:1", "--rule", "majority")
    assert (outcome.code, outcome.out) == (1, "")
    want = "error: RULE (rule): rule 'majority' is none of greedy, shared_noise, rejection, typical"
    assert outcome.err.strip() == want


def test_the_summary_says_what_drafts_did() -> None:
    plain = Usage(4, 10, 10, 0, 0, 0, first_token_s=0.5, total_s=2.0)
    assert len(summary(Finished("length", plain)).splitlines()) == 1
    drafted = replace(
        plain, steps=5, nodes_drafted=30, nodes_verified=12, nodes_accepted=5, nodes_stale=2, late_rounds=1,
        draft_wait_s=0.25, mean_width=2.4, width_reason="cost", verified_by_depth=(8, 4), accepted_by_depth=(5,),
    )  # fmt: skip
    first, second = summary(Finished("length", drafted)).splitlines()
    assert first.startswith("10 tokens (length), 5.0 tok/s, 2.00 tokens a step")
    assert second == (
        "drafts: 30 nodes sent, 12 verified, 5 accepted (by depth 5/8, 0/4), 2 stale, 1 rounds late; "
        "2.4 nodes a step (last: cost), 0.25 s waited"
    )


def test_the_status_marks_a_draft_that_failed_its_canary() -> None:
    output = io.StringIO()
    base = DraftState("a:1", "ready", "lm", "demo", 0, 8, 5, 0.5, 1.0)
    drafts = (replace(base, canary=0.9), replace(base, canary=0.0625, canary_failed=True), base)
    state = ClusterState("i", (), drafts, 0, 0, 0, 0, 0)
    console = Console(file=output, width=120, force_terminal=True, color_system="standard")
    console.print(*status_tables(state), sep="\n")
    rows = [line for line in output.getvalue().splitlines() if "a:1" in line]
    assert "\x1b[31mcanary 6%" in rows[1]
    assert rows[0] == rows[2] and "canary" not in rows[0], (
        "of one that has passed, or has not been tried, nothing is said"
    )


async def test_scale_sends_the_sizes_and_shows_the_pools(cluster: ScriptedCluster) -> None:
    await cluster.serve([await cluster.verifier()])
    where = ("--address", cluster.address)
    outcome = await draftwood("scale", "draft=4", *where)
    assert outcome.code == 1 and outcome.err.startswith("error: NO_CONTROLLER: ")
    asked: list[Mapping[str, int]] = []

    async def scale(counts: Mapping[str, int]) -> list[PoolState]:
        asked.append(counts)
        limits = PoolLimits("draft", "draft", 0, 8, 1.0), PoolLimits("verifier", "verifier", 1, None, 1.0)
        return [PoolState(limits[0], 4, 3, 1, 0, error="no such model"), PoolState(limits[1], 2, 2, 2, 1)]

    cluster.router.pools.scale = scale
    cluster.router.pools.states = tuple(await scale({}))
    outcome = await draftwood("scale", "draft=4", "verifier=2", *where)
    shown = await draftwood("status", *where)
    assert asked[1:] == [{"draft": 4, "verifier": 2}], outcome.err
    for out in (outcome.out, shown.out):
        rows = [" ".join(line.split()) for line in out.splitlines()]
        assert "draft draft 4 1/3 0 0 to 8 no such model" in rows and "verifier verifier 2 2/2 1 1 to any" in rows


@pytest.mark.parametrize("counts", [("draft",), ("draft=",), ("draft=-1",), ("=2",), ("draft=1", "draft=2"), ()])
async def test_a_size_that_is_none_is_refused(counts: tuple[str, ...]) -> None:
    outcome = await draftwood("scale", *counts, "--address", "127.0.0.1:1")
    assert outcome.code == 2 and "COUNTS" in outcome.err.upper()


def test_log_probabilities_are_a_table() -> None:
    output = io.StringIO()
    top = (Alternative(5, -0.25, "[b]"), Alternative(6, -2.0, "\n"))
    chunk = Chunk(0, (5, 9), ("[b]", ""), 1, (TokenLogprobs(-0.25, top), TokenLogprobs(-1.5, ())))
    Console(file=output, width=80).print(logprob_table([chunk]))
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines() if line.strip()]
    assert lines[0] == "log probabilities" and lines[1] == "token text logprob likeliest"
    assert lines[-2:] == ["5 '[b]' -0.250 '[b]' -0.250 '\\n' -2.000", "9 '' -1.500"]


async def test_chat_keeps_the_history(cluster: ScriptedCluster) -> None:
    verifier = await cluster.verifier()
    await cluster.serve([verifier])
    outcome = await draftwood(
        "chat", "--address", cluster.address, "--max-tokens", "2", "--seed", "5", stdin="one\n\ntwo\n/quit\n"
    )
    assert outcome.code == 0, outcome.err
    answer = "".join(f"{token} " for token in scripted_text(5, 2))
    turns = [(m.role, m.content) for m in verifier.log.requests[-1].generation.chat.messages]
    assert turns == [("user", "one"), ("assistant", answer), ("user", "two")]
    assert len(verifier.log.requests) == 2


async def test_status_shows_both_pools(cluster: ScriptedCluster, tmp_path: Path) -> None:
    verifier, draft = await cluster.verifier(), await cluster.draft("ngram")
    await cluster.serve([verifier], [draft])
    # A cluster is found by its state file, which must name a process that lives and is a supervisor.
    sleeper = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(60)", "router.supervisor"
    )
    record = ClusterRecord(sleeper.pid, cluster.address, "demo.yaml", 0.0)
    write_record(tmp_path / "draftwood" / "mine.json", record)
    outcome = await draftwood("status", "--name", "mine", state=tmp_path)
    assert outcome.code == 0, outcome.err
    for word in (verifier.address, draft.address, "ready", "ngram", "requests: 0 running"):
        assert word in outcome.out
    down = await draftwood("down", "--name", "mine", state=tmp_path)
    assert (down.code, down.out) == (0, "mine is down\n")
    assert await asyncio.wait_for(sleeper.wait(), 5) != 0


@pytest.mark.parametrize(
    "arguments, code, told",
    [
        (("generate", "hi"), 1, "error: NO_CLUSTER: no cluster named 'default'"),
        (
            ("generate", "hi", "--address", "127.0.0.1:1"),
            1,
            "error: ROUTER_UNREACHABLE: no router at 127.0.0.1:1",
        ),
        (("status", "--address", "127.0.0.1:1"), 1, "start a cluster with: draftwood up"),
        (("up", "--config", "/nonexistent.yaml"), 1, "error: CONFIG: cannot read /nonexistent.yaml"),
        (("generate",), 2, "Missing argument"),
    ],
)
async def test_errors_are_one_clear_line(arguments: tuple[str, ...], code: int, told: str) -> None:
    outcome = await draftwood(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert told in outcome.err
    if code == 1:
        assert len(outcome.err.strip().splitlines()) == 1


def test_a_state_file_of_a_dead_or_foreign_process_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_record(path) is None
    write_record(path, ClusterRecord(os.getpid(), "h:1", "c.yaml", 0.0))
    assert not is_running(os.getpid())  # alive, but no supervisor
    assert read_record(path) is None
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_state_file_is_under_the_users_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_path("a") == Path("/x/draftwood/a.json")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_path("a") == Path.home() / ".local/state/draftwood/a.json"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_example_files_are_valid(path: Path) -> None:
    assert load_cluster_config(path).name == path.stem


def test_the_demo_file_has_what_the_demo_shows() -> None:
    config = load_cluster_config(EXAMPLES / "demo.yaml")
    assert sum(pool.count for pool in config.verifiers) == 1
    assert sorted(pool.settings.kind for pool in config.drafts for _ in range(pool.count)) == ["lm", "ngram"]


def test_accepted_tokens_have_their_own_colour() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system="standard")
    show_chunk(console, Chunk(0, (1, 2), ("[b]", " c"), accepted=1))
    assert output.getvalue() == "\x1b[36m[b]\x1b[0m c"


def test_the_start_is_shown_by_role() -> None:
    output = io.StringIO()
    with StartView(Console(file=output), {"router": 1, "verifier": 1, "draft": 2}) as view:
        view.update("router", "router-0", "ready")
        view.update("draft", "draft-0", "ready")
        view.update("draft", "draft-1", "loading")
        view.update("draft", "draft-1", "ready")
        assert not view.ready
        view.update("verifier", "verifier-0", "ready")
        assert view.ready
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert lines == [
        "router ready 1 of 1",
        "verifier starting 0 of 1",
        "draft starting 0 of 2",
        "draft starting 1 of 2",
        "draft loading 1 of 2",
        "draft ready 2 of 2",
        "verifier ready 1 of 1",
    ]


def run_of(tokens: tuple[int, ...], steps: int, total_s: float) -> Run:
    return Run(tokens, Usage(4, len(tokens), steps, 0, 0, 0, first_token_s=0.5, total_s=total_s))


def test_the_demos_verdict_is_measured() -> None:
    pairs = [
        Pair("a", run_of((1, 2, 3, 4), 2, 1.5), run_of((1, 2, 3, 4), 4, 2.5)),
        Pair("b", run_of((5, 6), 1, 1.5), run_of((5, 6), 2, 1.5)),
    ]
    assert str(judge(pairs)) == "demo: identical=yes speedup=1.50x accepted=2.00"
    pairs.append(Pair("c", run_of((7,), 1, 1.5), run_of((8,), 1, 1.5)))
    assert str(judge(pairs)).startswith("demo: identical=no ")
    assert pair_table(pairs).row_count == 3


async def test_the_demo_asks_each_prompt_with_and_then_without_drafts(cluster: ScriptedCluster) -> None:
    verifier, draft = await cluster.verifier(), await cluster.draft()
    await cluster.serve([verifier], [draft])
    async with DraftwoodClient(cluster.address) as client:
        pairs = await compare(Console(file=io.StringIO()), client, 9)
    assert [pair.prompt for pair in pairs] == list(PROMPTS) and len(PROMPTS) == 8
    disabled = [request.generation.speculation.disabled for request in verifier.log.requests]
    assert disabled == [False, True] * 9
    asked = [request.generation.chat.messages[0].content for request in verifier.log.requests[2:]]
    assert asked == [prompt for prompt in PROMPTS for _ in range(2)]
