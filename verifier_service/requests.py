"""From protobuf to checked values: what a request may say, and how refusals are worded."""

from __future__ import annotations

from draftwood.acceptance import Ending, Rule, emit
from draftwood.errors import InvalidArgument
from draftwood.runtime.text import TextCodec
from draftwood.sampling import SamplingParams
from draftwood.v1 import draft_pb2
from draftwood.v1 import verifier_pb2 as pb
from verifier_service.session import GenerateRequest

ROLES = ("system", "user", "assistant")


def check_request(
    message: pb.VerifierServiceGenerateRequest,
    codec: TextCodec,
    *,
    token_count: int,
    context_limit: int,
    max_nodes: int,
    end_tokens: frozenset[int],
    seed: int,
    rule: Rule = Rule.SHARED_NOISE,
) -> GenerateRequest:
    """Tokenizes and checks a request; ``seed`` and ``rule`` are used when it names none.

    Raises InvalidArgument with a field path.
    """
    generation = message.generation
    if not message.session_id:
        raise InvalidArgument("SESSION_ID", "the session id is empty", field="session_id")
    prompt = _prompt(generation, codec)
    _check_tokens(prompt, token_count, "generation.prompt")
    resume = tuple(generation.resume_tokens)
    _check_tokens(resume, token_count, "generation.resume_tokens")
    _check_tokens(tuple(generation.stop_token_ids), token_count, "generation.stop_token_ids")
    if len(prompt) >= context_limit:
        limit = f"the context holds {context_limit} and at least one token must fit behind it"
        raise InvalidArgument(
            "PROMPT_TOO_LONG", f"the prompt has {len(prompt)} tokens, {limit}", field="generation.prompt"
        )
    max_tokens = _max_tokens(generation.max_tokens, context_limit - len(prompt))
    stops = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else end_tokens)
    ending = Ending(stops, max_tokens)
    if (possible := emit(resume, 0, ending).count) < len(resume):
        message_ = f"{len(resume)} tokens to resume from, but the text ends after {possible}"
        raise InvalidArgument("RESUME", message_, field="generation.resume_tokens")
    speculation = generation.speculation
    nodes = min(max_nodes, speculation.max_nodes or max_nodes)
    sampling = _sampling(generation.sampling, seed, token_count)
    return GenerateRequest(
        message.session_id,
        b"" if speculation.disabled else message.ticket,
        prompt,
        resume,
        sampling,
        ending,
        0 if speculation.disabled else nodes,
        _rule(speculation.rule, sampling, rule),
    )


def rule_to_proto(rule: Rule) -> draft_pb2.Rule:
    return getattr(draft_pb2, f"RULE_{rule.name}")  # type: ignore[no-any-return]


def _rule(asked: int, sampling: SamplingParams, default: Rule) -> Rule:
    if asked == draft_pb2.RULE_UNSPECIFIED:
        return default
    rule = next((rule for rule in Rule if rule_to_proto(rule) == asked), None)
    if rule is None:
        raise InvalidArgument("RULE", f"rule {asked} is not known here", field="generation.speculation.rule")
    if rule is Rule.GREEDY and not sampling.greedy:
        message = f"rule GREEDY has temperature 0, the request {sampling.temperature:g}"
        raise InvalidArgument("RULE", message, field="generation.speculation.rule")
    return rule


def _prompt(generation: pb.Generation, codec: TextCodec) -> tuple[int, ...]:
    kind = generation.WhichOneof("prompt")
    if kind == "token_ids":
        prompt = list(generation.token_ids.ids)
    elif kind == "chat" and generation.chat.messages:
        for k, turn in enumerate(generation.chat.messages):
            if turn.role not in ROLES:
                where = f"generation.chat.messages[{k}].role"
                raise InvalidArgument("CHAT_ROLE", f"role {turn.role!r} is none of {', '.join(ROLES)}", field=where)
        prompt = codec.render([{"role": m.role, "content": m.content} for m in generation.chat.messages])
    else:
        prompt = codec.encode(generation.text) if kind == "text" and generation.text else []
    if not prompt:
        raise InvalidArgument(
            "PROMPT_EMPTY", "the prompt is empty; at least one token is needed", field="generation.prompt"
        )
    return tuple(prompt)


def _check_tokens(tokens: tuple[int, ...], token_count: int, field: str) -> None:
    for k, token in enumerate(tokens):
        if token >= token_count:
            message = f"token {token} is out of the vocabulary of {token_count}"
            raise InvalidArgument("TOKEN_OUT_OF_VOCABULARY", message, field=f"{field}[{k}]")


def _max_tokens(asked: int, room: int) -> int:
    if asked > room:
        message = f"{asked} tokens are asked for, the context has room for {room}"
        raise InvalidArgument("MAX_TOKENS", message, field="generation.max_tokens")
    return asked or room


def _sampling(message: pb.Sampling, seed: int, token_count: int) -> SamplingParams:
    params = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else seed,
    )
    params.validate(token_count)
    return params
