"""When and how wide the verifier steps, simulated: the real planner against the best fixed width, on 200 loads.

A virtual clock, a device whose steps take T(rows) as measured on real machines (with noise), drafts that answer after a
turn-round, and clients whose number changes by a script. Everything that decides is the service's own:
``verifier_service.plan.Planner`` with its sessions and gates; only device, drafts and clients are made up.

    python benchmarks/serving/width_sim.py            # 200 scenarios, about 15 minutes on two cores
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))


from results import Check, write

from draftwood.acceptance import Ending
from draftwood.config import VerifierSettings
from draftwood.parameters import SamplingParams
from draftwood.tree import FloatArray, IntArray, TokenTree
from verifier_service.calibration import Calibration
from verifier_service.plan import FIRST_BUDGET, GATHER_STEPS, Part, Planner
from verifier_service.session import AttachedDraft, GenerateRequest, Session
from verifier_service.width import DWELL_STEPS, StepTimes

DRAFT_WAIT_MS = 150.0
TREES = 200
"""Trees drawn beforehand for each draft model; a round takes one of them, cut to its budget."""
MOST_NODES = 16
FIXED_WIDTHS = (0, 1, 2, 4, 8, 16)
Mode = Literal["adaptive"] | int


@dataclass(frozen=True, slots=True)
class Machine:
    """A verifier's step time over rows, as measured, and the turn-round of its drafts."""

    name: str
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    round_s: float  # of a round for one session
    round_session_s: float  # for each further session that is drawn for at that time
    noise: float = 0.03

    def step_s(self, rows: int) -> float:
        return float(StepTimes(self.rows, self.seconds)(np.array([rows]), 0)[0])


# SmolLM2-135M in float32 on two cores; the drafts run on the same ones.
CPU = Machine("cpu", (1, 8, 16, 32), (0.034, 0.037, 0.046, 0.074), 0.004, 0.0006)
# An 8B shape in bfloat16 on an H200 (benchmarks/results/step.json, wall_ms), drafts on another machine.
GPU = Machine("gpu", (1, 16, 64, 256), (0.00510, 0.00546, 0.00611, 0.00947), 0.0022, 0.00002)
# Made up, so that drafts pay for three sessions and not for five: rows are dear beyond four.
THRESHOLD = Machine("threshold", (1, 2, 4, 8, 16, 32), (0.020, 0.021, 0.022, 0.038, 0.070, 0.134), 0.002, 0.0003)
MACHINES = (CPU, GPU, THRESHOLD)


class DraftModel:
    """Random trees with true and claimed edge probabilities; nodes are in the order of a best-first search."""

    def __init__(self, quality: float, seed: int) -> None:
        self.quality = quality
        self._random = np.random.default_rng(seed)
        self._trees = [self._draw() for _ in range(TREES)]

    def _draw(self) -> Drawn:
        parent, truth, claimed, reach = [-1], [1.0], [0.0], [0.0]
        open_nodes = self._children(0, 0.0)
        while len(parent) <= MOST_NODES:
            best = max(open_nodes, key=lambda child: child.log_reach)
            open_nodes.remove(best)
            parent.append(best.parent)
            truth.append(best.truth)
            claimed.append(best.log_reach - reach[best.parent])
            reach.append(best.log_reach)
            open_nodes += self._children(len(parent) - 1, best.log_reach)
        return Drawn(np.array(parent, np.int32), np.array(truth), np.array(claimed, np.float32))

    def _children(self, node: int, log_reach: float) -> list[_Child]:
        """Three, the first with ``quality`` of the mass in the mean; what is claimed is off, and mostly too high."""
        left, out = 1.0, []
        for share in (self._random.beta(6 * self.quality, 6 * (1 - self.quality)), 0.45, 0.4):
            truth = max(0.002, left * float(share))
            left -= truth
            claimed = float(np.clip(truth * np.exp(self._random.normal(0.1, 0.35)), 0.001, 0.99))
            out.append(_Child(node, truth, log_reach + float(np.log(claimed))))
        return out

    def round(self, nodes: int) -> Drawn:
        drawn = self._trees[int(self._random.integers(TREES))]
        return Drawn(drawn.parent[: nodes + 1], drawn.truth[: nodes + 1], drawn.claimed[: nodes + 1])


@dataclass(frozen=True, slots=True)
class Drawn:
    """A round's tree; [nodes + 1] each, the anchor first."""

    parent: IntArray
    truth: NDArray[np.float64]  # probability that the target takes the node, given its parent
    claimed: FloatArray  # the draft's log of it


@dataclass(frozen=True, slots=True)
class _Child:
    parent: int
    truth: float
    log_reach: float


class SimulatedTree:
    """Stands in for ``LiveTree``: what the draft's last round has brought, with calibrated scores."""

    def __init__(self, calibration: Calibration) -> None:
        self.epoch = 0
        self._calibration = calibration
        self.clear()

    def clear(self) -> None:
        self.drawn: Drawn | None = None
        self._tree = TokenTree.root(0)

    def grow(self, drawn: Drawn) -> None:
        score = self._calibration.apply(drawn.claimed)
        score[0] = 0.0
        self.drawn, self._tree = drawn, TokenTree(drawn.parent, np.arange(len(score), dtype=np.int32), score)

    def tree(self) -> TokenTree:
        return self._tree

    def walk(self, kept: NDArray[np.int64], random: np.random.Generator) -> int:
        """Nodes accepted of those verified; the calibration learns from the outcome."""
        if self.drawn is None or len(kept) == 1:
            return 0
        at, accepted, nodes = 0, 0, kept.tolist()
        reached, taken = [], []
        while children := [n for n in nodes if n and self.drawn.parent[n] == at]:
            edges = np.cumsum(self.drawn.truth[children])
            place = int(np.searchsorted(edges, random.random()))
            reached += children
            taken += [k == place for k in range(len(children))]
            if place == len(children):
                break
            at, accepted = children[place], accepted + 1
        self._calibration.observe(self.drawn.claimed[reached], np.array(taken))
        return accepted


@dataclass(frozen=True, slots=True)
class Scenario:
    """Clients over time: ``clients[k]`` of them from ``k * slice_s`` on."""

    name: str
    machine: Machine
    quality: float
    clients: tuple[int, ...]
    seed: int
    longest_prompt: int = 40

    @property
    def slice_s(self) -> float:
        """About as long as ten plain steps."""
        return 10 * self.machine.step_s(1)


@dataclass(slots=True)
class Result:
    """What a run gave."""

    tokens: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    gather_s: float = 0.0  # the device stood still though some session had its tree
    longest_gather_s: float = 0.0
    steps: list[Step] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Step:
    began_s: float
    seconds: float
    clients: int
    sessions: int
    nodes: int
    prefill: int
    tokens: int
    drafts: bool


class Simulation:
    """One scenario under one mode: "adaptive", or so many nodes of every session whatever the load."""

    def __init__(self, scenario: Scenario, mode: Mode, planner: type[Planner] = Planner) -> None:
        self.scenario, self.machine, self.mode = scenario, scenario.machine, mode
        self._random = np.random.default_rng(scenario.seed)
        self._sizes = np.random.default_rng(scenario.seed + 2)  # the same requests under every mode
        self._drafts = DraftModel(scenario.quality, scenario.seed + 1)
        self._calibration = Calibration()
        self.planner = planner(
            VerifierSettings(
                width="adaptive" if mode == "adaptive" else "full", max_nodes=MOST_NODES, draft_wait_ms=DRAFT_WAIT_MS
            ),
            self._measured(),
        )
        self._nodes = MOST_NODES if mode == "adaptive" else mode
        self.now = 0.0
        self.sessions: list[Session] = []
        self._rounds: list[tuple[float, Session, int, int]] = []  # done at, for whom, epoch, nodes
        self._usual_round_s = 0.15
        self._count = 0
        self._gathered_s = 0.0  # since the last step
        self.result = Result()

    def _measured(self) -> StepTimes:
        """The grid as a verifier measures it at start: off by a common factor, and by a little at each point."""
        error = 0.9 * self._random.normal(1, 0.02, len(self.machine.rows))
        return StepTimes(self.machine.rows, np.array(self.machine.seconds) * error)

    def run(self) -> Result:
        end_s = len(self.scenario.clients) * self.scenario.slice_s
        while self.now < end_s:
            self._follow_clients()
            due = self.planner.due(self.now, self.sessions, self._usual_round)
            next_round = min((done for done, *_ in self._rounds), default=np.inf)
            if due is None or (due > self.now and next_round < due):
                self._pass_until(min(next_round, end_s) if due is None else next_round)
                continue
            self._pass_until(max(due, self.now))
            self._step()
        self.result.seconds = self.now
        return self.result

    # --- clients and drafts ---

    def _follow_clients(self) -> None:
        clients = self._clients()
        for session in self.sessions[clients:]:
            self._leave(session)
        while len(self.sessions) < clients:
            self._count += 1
            prompt_tokens, max_tokens = self._sizes.integers((24, 96), (self.scenario.longest_prompt, 144)).tolist()
            prompt, ending = (0,) * prompt_tokens, Ending(frozenset(), max_tokens)
            request = GenerateRequest(f"s{self._count}", b"t", prompt, (), SamplingParams(), ending, self._nodes)
            session = Session(request, self.now, 1)
            session.pages, session.node_room = [0], self._nodes
            session.tree = SimulatedTree(self._calibration)  # type: ignore[assignment]
            session.drafts[0] = AttachedDraft(1)
            self.sessions.append(session)
            self.planner.share_among(self.sessions)
            session.budget = self.planner.budget(session, FIRST_BUDGET)
            self._draw(session)

    def _clients(self) -> int:
        return self.scenario.clients[min(int(self.now / self.scenario.slice_s), len(self.scenario.clients) - 1)]

    def _leave(self, session: Session) -> None:
        self.sessions.remove(session)
        self._rounds = [r for r in self._rounds if r[1] is not session]

    def _draw(self, session: Session) -> None:
        """The draft begins a round for the session; one that had slept has to catch up first."""
        draft = session.drafts[0]
        if session.budget:
            took = self.machine.round_s * (2 if draft.asleep else 1) + self.machine.round_session_s * len(self._rounds)
            took *= float(self._random.lognormal(0, 0.2))
            self._rounds.append((self.now + took, session, session.tree.epoch, session.budget))
        draft.asleep = session.budget == 0

    def _pass_until(self, time_s: float) -> None:
        if time_s > self.now and any(self._ready(s) for s in self.sessions):
            self.result.gather_s += time_s - self.now
            self._gathered_s += time_s - self.now
        self.now = time_s
        self._finish_rounds()

    def _ready(self, session: Session) -> bool:
        return session.decoding and not session.awaited()

    def _finish_rounds(self) -> None:
        done = [r for r in self._rounds if r[0] <= self.now]
        self._rounds = [r for r in self._rounds if r[0] > self.now]
        for done_s, session, epoch, nodes in done:
            if epoch == session.tree.epoch:
                session.tree.grow(self._drafts.round(nodes))  # type: ignore[call-arg, arg-type]
                session.drafts[0].complete_epoch, session.drafts[0].misses = epoch, 0
                self._usual_round_s += 0.2 * (done_s - session.committed_s - self._usual_round_s)

    def _usual_round(self, _: Session) -> float:
        return self._usual_round_s

    # --- the device ---

    def _step(self) -> None:
        began = self.now
        self.result.longest_gather_s = max(self.result.longest_gather_s, self._gathered_s)
        self._gathered_s = 0.0
        parts = self.planner.plan(began, self.sessions, self._usual_round)
        rows = sum(len(part.rows.token) for part in parts)
        seconds = self.machine.step_s(rows) * float(self._random.lognormal(0, self.machine.noise))
        self.now += seconds
        self._finish_rounds()
        tokens = sum(self._accept(part) for part in parts)
        nodes = sum(part.tree.size - 1 for part in parts)
        decoding = sum(part.decodes for part in parts)
        drafts = self.planner.gate.open
        self.result.steps.append(
            Step(began, seconds, self._clients(), decoding, nodes, rows - nodes - decoding, tokens, drafts)
        )
        self.result.tokens += tokens
        self.result.busy_s += seconds
        self.planner.finished(parts, tokens, len(self.sessions), seconds, began, self.now)

    def _accept(self, part: Part) -> int:
        """Tokens that the step wrote for the session."""
        session, tree = part.session, part.session.tree
        session.cached += len(part.rows.token) - (part.tree.size - 1)
        if part.rows.logits_from == len(part.rows.token):  # prefill that does not reach the anchor
            return 0
        accepted = tree.walk(part.kept, self._random)  # type: ignore[attr-defined]
        tokens = min(accepted + 1, session.remaining)
        session.drafts[0].misses += session.drafts[0].complete_epoch < tree.epoch and session.budget > 0
        session.tokens += [0] * tokens
        session.cached += tokens - 1
        tree.epoch += 1
        tree.clear()  # type: ignore[attr-defined]
        if not session.remaining:
            self._leave(session)
            return tokens
        session.budget = self.planner.next_budget(part)
        session.committed_s = self.now
        self._draw(session)
        return tokens


# --- scenarios ---

SLICES = 100
REPEATS, CLOSE_REPEATS = 2, 6
"""Runs of each scenario, and of one that comes within ``CLOSE`` of a bound: two runs of 20 s tell its ratio to 1 %,
which is more than the lowest of 200 may be off by."""

CLOSE = 0.015
BEST_BOUND, PLAIN_BOUND = 0.95, 0.97
QUALITIES = (0.1, 0.4, 0.6, 0.8)
KINDS = ("step", "ramp", "sawtooth", "noise")


def scenarios(count: int) -> list[Scenario]:
    """Step, ramp, sawtooth and noise in turn, over the machines and over drafts from useless to good."""
    random = np.random.default_rng(1)
    out = []
    for k in range(count):
        kind, machine = KINDS[k % 4], MACHINES[k // 4 % len(MACHINES)]
        quality = QUALITIES[k // 12 % len(QUALITIES)]
        low, high = (3, 5) if machine.name == "threshold" and k % 8 < 4 else _levels(random, machine)
        clients = tuple(int(c) for c in np.clip(_curve(kind, low, high, random), 1, None))
        out.append(Scenario(f"{kind}-{machine.name}-{quality}-{low}-{high}-{k}", machine, quality, clients, k))
    return out


def _levels(random: np.random.Generator, machine: Machine) -> tuple[int, int]:
    high = int(random.integers(4, 25 if machine.name == "gpu" else 17))
    return int(random.integers(1, high)), high


def _curve(kind: str, low: int, high: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Clients a slice."""
    at = np.arange(SLICES)
    if kind == "step":
        begins_high = bool(random.integers(2))
        return np.where((at < SLICES // 2) == begins_high, high, low)
    if kind == "ramp":
        return low + (high - low) * at / (SLICES - 1)
    if kind == "sawtooth":
        return low + (high - low) * (at % 12) / 11
    walk = np.cumsum(random.choice([-1, 0, 1], SLICES))
    return low + np.abs((walk + random.integers(high - low + 1)) % (2 * (high - low)) - (high - low))


# --- figures ---


@dataclass(frozen=True, slots=True)
class Figures:
    """One scenario: tokens a second against fixed widths, and how the drafts went on and off."""

    name: str
    over_best: float
    over_plain: float
    best_width: int
    width: float  # nodes a session, mean
    switches: int
    shortest_hold_steps: int  # between two switches
    gather_share: float  # of the time, the device waited while a session was ready
    drafts_on: float  # share of steps
    runs: int

    @property
    def close(self) -> bool:
        """Comes near a bound, on either side."""
        return self.over_best < BEST_BOUND + CLOSE or self.over_plain < PLAIN_BOUND + CLOSE


def figures(scenario: Scenario, runs: int = REPEATS) -> Figures:
    """Runs the scenario adaptively and at every fixed width.

    The best width is the one that wrote most in the first run of each; it, plain decoding and the adaptive one run
    ``runs`` times, with other requests and noise.
    """
    repeats = [replace(scenario, seed=scenario.seed + 1000 * k) for k in range(runs)]
    tried = {width: Simulation(scenario, width).run() for width in FIXED_WIDTHS}
    best = max(tried, key=lambda width: tried[width].rate)
    fixed = {width: _rate([tried[width], *(Simulation(r, width).run() for r in repeats[1:])]) for width in {0, best}}
    adaptive = [Simulation(r, "adaptive").run() for r in repeats]
    steps = [step for run in adaptive for step in run.steps]
    switched = [switches(run) for run in adaptive]
    holds = [b - a for run in switched for a, b in itertools.pairwise(run)]
    return Figures(
        scenario.name,
        round(_rate(adaptive) / fixed[best], 4),
        round(_rate(adaptive) / fixed[0], 4),
        best,
        round(sum(s.nodes for s in steps) / max(1, sum(s.sessions for s in steps)), 2),
        sum(map(len, switched)),
        min(holds, default=len(steps)),
        round(sum(run.gather_s for run in adaptive) / sum(run.seconds for run in adaptive), 4),
        round(sum(s.drafts for s in steps) / len(steps), 3),
        runs,
    )


def _rate(runs: Sequence[Result]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def switches(run: Result) -> list[int]:
    """Steps at which drafts went on or off."""
    return [k for k, (a, b) in enumerate(itertools.pairwise(run.steps), 1) if a.drafts != b.drafts]


def settling_steps(machine: Machine, quality: float, clients: tuple[int, int], seed: int) -> int:
    """Steps after a sudden change of load until drafts are on or off for good; prompts are short and answers long."""
    before, after = clients
    change = 40
    scenario = Scenario("settling", machine, quality, (before,) * change + (after,) * 20, seed, longest_prompt=25)
    run = Simulation(scenario, "adaptive").run()
    changed = next(k for k, step in enumerate(run.steps) if step.clients == after)
    arrived = next(k for k in range(changed, len(run.steps)) if run.steps[k].sessions >= 0.9 * after)
    late = [k - arrived for k in switches(run) if changed < k < arrived + 100]  # a trial comes later than that
    return max(0, *late, 0)


def gathering() -> list[dict[str, Any]]:
    """Tokens a second by how long ready sessions wait for others, in plain steps: what waiting costs and buys."""
    out = []
    for machine, quality, clients in itertools.product(MACHINES[:2], (0.6,), (4, 16)):
        for slower in (1, 4):
            slow = replace(machine, round_s=machine.round_s * slower, round_session_s=machine.round_session_s * slower)
            scenario = Scenario("gathering", slow, quality, (clients,) * 40, 5)
            row: dict[str, Any] = {"machine": machine.name, "clients": clients, "draft_rounds": f"{slower} x"}
            for wait in (0.0, 0.5, GATHER_STEPS, 2.0):
                kind = type("Waits", (Planner,), {"gather_steps": wait})
                run = Simulation(scenario, 4, kind).run()
                row[f"tokens_s_at_{wait:g}"] = round(run.rate, 1)
                if wait == GATHER_STEPS:
                    row["gather_share"] = round(run.gather_s / run.seconds, 4)
                    row["sessions_a_step"] = round(statistics.mean(s.sessions for s in run.steps) / clients, 3)
            out.append(row)
    return out


def _more_figures(scenario: Scenario) -> Figures:
    return figures(scenario, CLOSE_REPEATS)


def _show(number: int, f: Figures) -> None:
    print(
        f"{number:3} {f.name:32} {f.over_best:.3f} of width {f.best_width:2}, {f.over_plain:.3f} of plain; "
        f"width {f.width:4.1f}, drafts on {f.drafts_on:.2f}, {f.switches} switches, {f.runs} runs",
        flush=True,
    )


def main() -> bool:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    tried, found = list(scenarios(chosen.count)), list[Figures]()
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for f in pool.imap(figures, tried):
            found.append(f)
            _show(len(found), f)
        again = [k for k, f in enumerate(found) if f.close]
        for k, f in zip(again, pool.imap(_more_figures, [tried[k] for k in again]), strict=True):
            found[k] = f
            _show(k + 1, f)
        jumps = [(m, q, c, s) for m in MACHINES for q in (0.1, 0.6) for c in ((2, 16), (16, 2)) for s in (1, 2)]
        settled = pool.starmap(settling_steps, jumps)
    waits = gathering()
    checks = [
        Check("width/sim_vs_best_fixed_min", min(f.over_best for f in found), ">=", BEST_BOUND),
        Check("width/sim_vs_plain_min", min(f.over_plain for f in found), ">=", PLAIN_BOUND),
        Check("width/sim_settling_steps_max", float(max(settled)), "<=", 20.0),
        Check("width/sim_shortest_hold_steps", float(min(f.shortest_hold_steps for f in found)), ">=", DWELL_STEPS),
    ]
    details = {
        "scenarios": len(found),
        "repeats": f"{REPEATS}; {CLOSE_REPEATS} of the {len(again)} scenarios that came within {CLOSE} of a bound",
        "over_best_mean": round(statistics.mean(f.over_best for f in found), 4),
        "over_plain_mean": round(statistics.mean(f.over_plain for f in found), 4),
        "fixed_widths": FIXED_WIDTHS,
        "machines": [asdict(machine) for machine in MACHINES],
        "gathering": waits,
        "each": [asdict(f) for f in found],
    }
    return write("width", checks, details)


if __name__ == "__main__":
    sys.exit(not main())
