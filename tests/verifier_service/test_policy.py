"""Caps from several setters, with their leases, on a clock that the tests turn."""

from __future__ import annotations

import random

import pytest

from draftwood.errors import InvalidArgument, ResourceExhausted
from draftwood.v1 import draft_pb2, verifier_pb2
from draftwood.wire import Drawing
from verifier_service.policy import (
    LEASE_S,
    MOST_SETTER_CHARACTERS,
    MOST_SETTERS,
    OPERATOR,
    PolicyBook,
    Terms,
    terms_from_proto,
    terms_to_proto,
)
from verifier_service.width import Policy


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def nodes(count: int | None) -> Terms:
    return Terms(Policy(max_session_nodes=count))


def test_the_narrowest_of_all_holds_field_by_field() -> None:
    book = PolicyBook(Clock())
    assert book.in_force() == Terms()
    book.set("a", Terms(Policy(8, 100), Drawing(None)))
    book.set("b", Terms(Policy(16, 40), Drawing(4)))
    book.set(OPERATOR, Terms(Policy(None, None), Drawing(6, chain=True)))
    assert book.in_force() == Terms(Policy(8, 40), Drawing(4, chain=True))
    book.set("a", Terms())
    assert book.in_force() == Terms(Policy(16, 40), Drawing(4, chain=True)), "a setter replaces its own words alone"


def test_a_routers_policy_ends_with_its_lease_and_an_operators_does_not() -> None:
    book = PolicyBook(clock := Clock())
    book.set("router", nodes(2))
    book.set(OPERATOR, nodes(9))
    clock.now = LEASE_S - 0.1
    assert book.in_force() == nodes(2)
    book.set("router", nodes(2))
    clock.now = LEASE_S + 1
    assert book.in_force() == nodes(2), "renewed"
    clock.now = 3 * LEASE_S
    assert book.in_force() == nodes(9)


def test_a_router_cannot_widen_what_an_operator_has_set() -> None:
    book = PolicyBook(Clock())
    book.set(OPERATOR, nodes(4))
    for count in (None, 64, 5):
        book.set("router", nodes(count))
        assert book.in_force() == nodes(4)
    book.set(OPERATOR, nodes(None))
    assert book.in_force() == nodes(5)


def test_a_depth_of_zero_is_plain_decoding() -> None:
    book = PolicyBook(Clock())
    book.set("a", Terms(Policy(), Drawing(0)))
    assert book.in_force().nodes.max_session_nodes == 0


def test_setters_are_bounded_and_those_that_have_lapsed_make_room() -> None:
    book = PolicyBook(clock := Clock())
    for k in range(MOST_SETTERS):
        book.set(f"r{k}", nodes(k + 1))
    with pytest.raises(ResourceExhausted, match=f"{MOST_SETTERS} setters") as caught:
        book.set("one more", nodes(1))
    assert caught.value.reason == "POLICY_SETTERS" and caught.value.retry_after_ms == LEASE_S * 1e3
    book.set("r0", nodes(7))
    clock.now = LEASE_S
    book.set("one more", nodes(3))
    assert book.in_force() == nodes(3)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_list_of_all_that_was_said(seed: int) -> None:
    rng, book = random.Random(seed), PolicyBook(clock := Clock())
    said: list[tuple[float, str, int | None]] = []
    for _ in range(200):
        clock.now += rng.uniform(0, 10)
        name, cap = rng.choice(["a", "b", OPERATOR]), rng.choice([None, 1, 5, 30])
        book.set(name, nodes(cap))
        said.append((clock.now, name, cap))
        last = {name: (at, cap) for at, name, cap in said}
        held = [cap for name, (at, cap) in last.items() if name == OPERATOR or clock.now < at + LEASE_S]
        want = min((cap for cap in held if cap is not None), default=None)
        assert book.in_force().nodes.max_session_nodes == want


def test_a_setters_name_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="65 characters, at most 64") as caught:
        PolicyBook(Clock()).set("x" * (MOST_SETTER_CHARACTERS + 1), Terms())
    assert (caught.value.reason, caught.value.field) == ("POLICY", "setter")


def test_a_rule_of_growth_that_is_not_known_is_refused() -> None:
    message = verifier_pb2.Policy.FromString(b"\x20\x63")  # growth: 99
    with pytest.raises(InvalidArgument, match="growth rule 99 is not known here") as caught:
        terms_from_proto(message)
    assert (caught.value.reason, caught.value.field) == ("POLICY", "policy.growth")


@pytest.mark.parametrize(
    "terms", [Terms(), Terms(Policy(0, 7), Drawing(3)), Terms(Policy(None, 0), Drawing(None, chain=True))]
)
def test_terms_survive_the_wire(terms: Terms) -> None:
    message = terms_to_proto(terms)
    assert terms_from_proto(verifier_pb2.Policy.FromString(message.SerializeToString())) == terms
    assert message.HasField("max_session_nodes") == (terms.nodes.max_session_nodes is not None)
    assert message.growth in draft_pb2.GrowthRule.values()
