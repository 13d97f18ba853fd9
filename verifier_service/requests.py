"""From protobuf to checked values: what a request may say, and how refusals are worded."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from draftwood.acceptance import Emission, Ending, emit
from draftwood.errors import InvalidArgument
from draftwood.parameters import (
    MAX_BAD_WORDS,
    ProcessorParams,
    Rule,
    SamplingParams,
    check_bad_word,
    check_count,
    check_parameter,
)
from draftwood.runtime.text import TextCodec, TextStream
from draftwood.stop_strings import StopStrings
from draftwood.v1 import draft_pb2
from draftwood.v1 import verifier_pb2 as pb
from verifier_service.constraints import MAX_CONSTRAINT_BYTES, Constraint
from verifier_service.session import GenerateRequest

LONGEST_DEADLINE_MS = 3_600_000
ROLES = ("system", "user", "assistant")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    request: GenerateRequest
    text: TextStream  # of the generation, behind the resumed tokens
    resumed: Emission  # what becomes of the resumed tokens


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
) -> CheckedRequest:
    """Tokenizes and checks a request; ``seed`` and ``rule`` are used when it names none.

    Raises InvalidArgument with a field path.
    """
    generation = message.generation
    if not message.session_id:
        raise InvalidArgument("SESSION_ID", "the session id is empty", field="session_id")
    _check_known(generation)
    if generation.HasField("n") and generation.n != 1:
        message_ = f"n is {generation.n}, but a verifier writes one text a session; ask the router"
        raise InvalidArgument("CHOICES", message_, field="generation.n")
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
    stop_tokens = frozenset(generation.stop_token_ids) | (frozenset() if generation.ignore_eos else end_tokens)
    ending = Ending(stop_tokens, max_tokens)
    stops, text = _text(generation, codec)
    resumed = emit(resume, 0, ending, text)
    text.take()  # the caller has their text
    if resumed.count < len(resume):
        message_ = f"{len(resume)} tokens to resume from, but the text ends after {resumed.count}"
        raise InvalidArgument("RESUME", message_, field="generation.resume_tokens")
    if generation.deadline_ms > LONGEST_DEADLINE_MS:
        message_ = f"a deadline of {generation.deadline_ms} ms; at most {LONGEST_DEADLINE_MS} ms may be asked for"
        raise InvalidArgument("DEADLINE_TOO_LONG", message_, field="generation.deadline_ms")
    speculation = generation.speculation
    nodes = min(max_nodes, speculation.max_nodes or max_nodes)
    sampling = _sampling(generation.sampling, codec, seed, token_count, ending)
    request = GenerateRequest(
        message.session_id,
        b"" if speculation.disabled else message.ticket,
        prompt,
        resume,
        sampling,
        ending,
        0 if speculation.disabled else nodes,
        _top_logprobs(generation.sampling, token_count),
        text=text if stops else None,
        deadline_ms=generation.deadline_ms,
        rule=_rule(speculation.rule, sampling, rule),
        constraint=_constraint(generation),
    )
    return CheckedRequest(request, text, resumed)


def _check_known(generation: pb.Generation) -> None:
    """Raises UNKNOWN_FIELD for what a newer client may ask for and we cannot do: ignored, it would change the text."""
    parts: dict[str, Message] = {
        "generation": generation, "sampling": generation.sampling, "generation.speculation": generation.speculation,
        "generation.constraint": generation.constraint,
    }  # fmt: skip
    for field, part in parts.items():
        unknown = UnknownFieldSet(part)
        if len(unknown):
            message = f"field {unknown[0].field_number} of {field} is not known to this version"
            raise InvalidArgument("UNKNOWN_FIELD", message, field=field)


def _text(generation: pb.Generation, codec: TextCodec) -> tuple[bool, TextStream]:
    """Whether there are stop strings, and the text they are searched for in. Raises STOP_STRINGS."""
    if len(generation.stop) > MAX_STOP_STRINGS:
        message = f"{len(generation.stop)} stop strings, at most {MAX_STOP_STRINGS} are taken"
        raise InvalidArgument("STOP_STRINGS", message, field="generation.stop")
    for k, string in enumerate(generation.stop):
        if not 0 < len(string) <= MAX_STOP_CHARACTERS:
            message = f"a stop string has {len(string)} characters; it may have 1 to {MAX_STOP_CHARACTERS}"
            raise InvalidArgument("STOP_STRINGS", message, field=f"generation.stop[{k}]")
    text = codec.stream(
        StopStrings(generation.stop) if generation.stop else None,
        include_stop=generation.include_stop_str_in_output,
        min_tokens=generation.sampling.min_tokens,
        skip_special_tokens=generation.skip_special_tokens if generation.HasField("skip_special_tokens") else True,
    )
    return bool(generation.stop), text


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


def _constraint(generation: pb.Generation) -> Constraint | None:
    """Raises CONSTRAINT for one that is empty or too long, or that could not end the text."""
    message, kind = generation.constraint, generation.constraint.WhichOneof("kind")
    if not generation.HasField("constraint"):
        return None
    if kind is None or (kind == "json_object" and not message.json_object):
        raise InvalidArgument("CONSTRAINT", "the constraint says nothing", field="generation.constraint")
    if generation.ignore_eos:
        why = "a constrained text ends with an end token, so ignore_eos cannot be honoured"
        raise InvalidArgument("CONSTRAINT", why, field="generation.ignore_eos")
    text = "" if kind == "json_object" else getattr(message, kind)
    if (size := len(text.encode())) > MAX_CONSTRAINT_BYTES:
        why = f"it has {size} bytes, at most {MAX_CONSTRAINT_BYTES} are taken"
        raise InvalidArgument("CONSTRAINT", why, field=f"generation.constraint.{kind}")
    return Constraint(kind, text)


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


def _sampling(message: pb.Sampling, codec: TextCodec, seed: int, token_count: int, ending: Ending) -> SamplingParams:
    most = ending.max_tokens
    check_parameter("min_tokens", message.min_tokens, message.min_tokens <= most, f"in [0, {most}], max_tokens")
    processors = ProcessorParams(
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=_bad_words(message, codec, token_count),
        min_tokens=message.min_tokens,
        end_tokens=tuple(sorted(ending.stop_token_ids)) if message.min_tokens else (),
    )
    params = SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        seed=message.seed if message.HasField("seed") else seed,
        min_p=message.min_p,
        processors=None if processors == ProcessorParams() else processors,
    )
    params.validate(token_count)
    return params


def _bad_words(message: pb.Sampling, codec: TextCodec, token_count: int) -> tuple[tuple[int, ...], ...]:
    """Token sequences without repetitions; a text gives up to two, with and without a leading space."""
    check_count("bad_words", len(message.bad_words), MAX_BAD_WORDS, "entries")
    words: list[tuple[int, ...]] = []
    for k, entry in enumerate(message.bad_words):
        ids = [entry.token_ids.ids] if entry.WhichOneof("word") == "token_ids" else codec.spellings(entry.text)
        for word in ids:
            check_bad_word(word, token_count, f"bad_words[{k}]")
            words.append(tuple(word))
    return tuple(dict.fromkeys(words))


def _top_logprobs(message: pb.Sampling, token_count: int) -> int | None:
    """How many alternatives are to be reported; None: no log probabilities at all."""
    count, most = message.top_logprobs, min(MAX_TOP_LOGPROBS, token_count)
    check_parameter("top_logprobs", count, count <= most, f"in [0, {most}]")
    if message.logprobs:
        return count
    check_parameter("top_logprobs", count, count == 0, "0 unless logprobs is set")
    return None
