"""A request for several texts: one generation each, in one stream.

Each text is a session of its own at some verifier, so that losses are repaired for each by itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from draftwood.choices import choice_seed, merged
from draftwood.errors import InvalidArgument
from draftwood.v1 import router_pb2, verifier_pb2
from router.generation import Event, Generation
from router.progress import seeded
from router.state import RouterState


def check_choices(generation: verifier_pb2.Generation, limit: int) -> int:
    """How many texts are asked for. Raises InvalidArgument CHOICES."""
    choices = generation.n if generation.HasField("n") else 1
    fault = ""
    if not 1 <= choices <= limit:
        fault = f"it may be 1 to {limit}"
    elif choices > 1 and generation.sampling.temperature == 0:
        fault = "it must be 1 when temperature is 0, as all texts would be the same"
    elif choices > 1 and generation.resume_tokens:
        fault = "it must be 1 with resume_tokens; resume each text with the seed that its started named"
    if fault:
        raise InvalidArgument("CHOICES", f"n is {choices}; {fault}", field="generation.n")
    return choices


async def choice_events(
    state: RouterState, request: router_pb2.RouterServiceGenerateRequest, remaining_s: float | None, choices: int
) -> AsyncGenerator[Event]:
    """What the client is to receive of all ``choices`` texts. Raises the first error that any meets."""
    base = seeded(request.generation)
    streams = []
    for index in range(choices):
        single = router_pb2.RouterServiceGenerateRequest(model=request.model, generation=base)
        single.generation.ClearField("n")
        single.generation.sampling.seed = choice_seed(base.sampling.seed, index)
        streams.append(Generation(state, single, remaining_s).events())
    if choices == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield event
        return
    async with aclosing(merged(streams)) as indexed:
        async for index, event in indexed:
            event.index = index
            yield event
