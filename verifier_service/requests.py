"""From protobuf to checked values: what a request may say, and how refusals are worded."""

from __future__ import annotations

from draftwood.acceptance import Ending, emit
from draftwood.errors import InvalidArgument
from draftwood.processors import MAX_BAD_WORDS, ProcessorParams, check_bad_word, check_count, check_parameter
from draftwood.runtime.text import TextCodec
from draftwood.sampling import SamplingParams
from draftwood.v1 import verifier_pb2 as pb
from verifier_service.constraints import MAX_CONSTRAINT_BYTES, Constraint
from verifier_service.session import GenerateRequest

ROLES = ("system", "user", "assistant")
MAX_TOP_LOGPROBS = 20


def check_request(
    message: pb.VerifierServiceGenerateRequest,
    codec: TextCodec,
    *,
    token_count: int,
    context_limit: int,
    max_nodes: int,
    end_tokens: frozenset[int],
    seed: int,
) -> GenerateRequest:
    """Tokenizes and checks a request; ``seed`` is used when it names none. Raises InvalidArgument with a field path."""
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
    return GenerateRequest(
        message.session_id,
        b"" if speculation.disabled else message.ticket,
        prompt,
        resume,
        _sampling(generation.sampling, codec, seed, token_count, ending),
        ending,
        0 if speculation.disabled else nodes,
        _top_logprobs(generation.sampling, token_count),
        constraint=_constraint(generation),
    )


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
