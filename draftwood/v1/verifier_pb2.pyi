from draftwood.v1 import draft_pb2 as _draft_pb2
from draftwood.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]

class WidthReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WIDTH_REASON_UNSPECIFIED: _ClassVar[WidthReason]
    WIDTH_REASON_NO_NODES: _ClassVar[WidthReason]
    WIDTH_REASON_SHUT: _ClassVar[WidthReason]
    WIDTH_REASON_BASELINE: _ClassVar[WidthReason]
    WIDTH_REASON_COST: _ClassVar[WidthReason]
    WIDTH_REASON_ALL: _ClassVar[WidthReason]
    WIDTH_REASON_PROBE: _ClassVar[WidthReason]
    WIDTH_REASON_FULL: _ClassVar[WidthReason]
    WIDTH_REASON_PREFILL: _ClassVar[WidthReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
WIDTH_REASON_UNSPECIFIED: WidthReason
WIDTH_REASON_NO_NODES: WidthReason
WIDTH_REASON_SHUT: WidthReason
WIDTH_REASON_BASELINE: WidthReason
WIDTH_REASON_COST: WidthReason
WIDTH_REASON_ALL: WidthReason
WIDTH_REASON_PROBE: WidthReason
WIDTH_REASON_FULL: WidthReason
WIDTH_REASON_PREFILL: WidthReason

class VerifierServiceGenerateRequest(_message.Message):
    __slots__ = ("generation", "session_id", "ticket")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    generation: Generation
    session_id: str
    ticket: bytes
    def __init__(self, generation: _Optional[_Union[Generation, _Mapping]] = ..., session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class VerifierServiceGenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: GenerationEvent
    def __init__(self, event: _Optional[_Union[GenerationEvent, _Mapping]] = ...) -> None: ...

class VerifierServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ModelInfo
    def __init__(self, model: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class VerifierServiceWatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierServiceWatchLoadResponse(_message.Message):
    __slots__ = ("incarnation", "running", "waiting", "max_sessions", "free_pages", "total_pages", "steps", "tokens", "nodes_verified", "nodes_accepted", "step_ms", "width", "draining", "nodes_stale", "growths_refused", "cached_pages", "preempted", "preemptions", "canaries", "queue_wait_ms", "narrow_steps", "policy")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NODES_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NODES_STALE_FIELD_NUMBER: _ClassVar[int]
    GROWTHS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CANARIES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    NARROW_STEPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    running: int
    waiting: int
    max_sessions: int
    free_pages: int
    total_pages: int
    steps: int
    tokens: int
    nodes_verified: int
    nodes_accepted: int
    step_ms: float
    width: float
    draining: bool
    nodes_stale: int
    growths_refused: int
    cached_pages: int
    preempted: int
    preemptions: int
    canaries: _containers.RepeatedCompositeFieldContainer[CanaryResult]
    queue_wait_ms: float
    narrow_steps: int
    policy: Policy
    def __init__(self, incarnation: _Optional[str] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., max_sessions: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., nodes_verified: _Optional[int] = ..., nodes_accepted: _Optional[int] = ..., step_ms: _Optional[float] = ..., width: _Optional[float] = ..., draining: _Optional[bool] = ..., nodes_stale: _Optional[int] = ..., growths_refused: _Optional[int] = ..., cached_pages: _Optional[int] = ..., preempted: _Optional[int] = ..., preemptions: _Optional[int] = ..., canaries: _Optional[_Iterable[_Union[CanaryResult, _Mapping]]] = ..., queue_wait_ms: _Optional[float] = ..., narrow_steps: _Optional[int] = ..., policy: _Optional[_Union[Policy, _Mapping]] = ...) -> None: ...

class CanaryResult(_message.Message):
    __slots__ = ("incarnation", "taken", "steps", "failed")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    taken: int
    steps: int
    failed: bool
    def __init__(self, incarnation: _Optional[str] = ..., taken: _Optional[int] = ..., steps: _Optional[int] = ..., failed: _Optional[bool] = ...) -> None: ...

class VerifierServiceSetPolicyRequest(_message.Message):
    __slots__ = ("policy", "setter")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SETTER_FIELD_NUMBER: _ClassVar[int]
    policy: Policy
    setter: str
    def __init__(self, policy: _Optional[_Union[Policy, _Mapping]] = ..., setter: _Optional[str] = ...) -> None: ...

class VerifierServiceSetPolicyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Policy(_message.Message):
    __slots__ = ("max_session_nodes", "max_step_nodes", "max_depth", "growth")
    MAX_SESSION_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    max_session_nodes: int
    max_step_nodes: int
    max_depth: int
    growth: _draft_pb2.GrowthRule
    def __init__(self, max_session_nodes: _Optional[int] = ..., max_step_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., growth: _Optional[_Union[_draft_pb2.GrowthRule, str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "incarnation", "tokenizer", "caps", "dtype", "device")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CAPS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    tokenizer: _draft_pb2.TokenizerInfo
    caps: _draft_pb2.Caps
    dtype: str
    device: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., tokenizer: _Optional[_Union[_draft_pb2.TokenizerInfo, _Mapping]] = ..., caps: _Optional[_Union[_draft_pb2.Caps, _Mapping]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Generation(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "speculation", "resume_tokens", "constraint", "stop", "include_stop_str_in_output", "skip_special_tokens", "n", "deadline_ms")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: Chat
    token_ids: TokenIds
    sampling: Sampling
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    speculation: Speculation
    resume_tokens: _containers.RepeatedScalarFieldContainer[int]
    constraint: Constraint
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    n: int
    deadline_ms: int
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., resume_tokens: _Optional[_Iterable[int]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words", "min_tokens", "logprobs", "top_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    min_tokens: int
    logprobs: bool
    top_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("disabled", "max_nodes", "rule")
    DISABLED_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    disabled: bool
    max_nodes: int
    rule: _draft_pb2.Rule
    def __init__(self, disabled: _Optional[bool] = ..., max_nodes: _Optional[int] = ..., rule: _Optional[_Union[_draft_pb2.Rule, str]] = ...) -> None: ...

class GenerationEvent(_message.Message):
    __slots__ = ("started", "chunk", "finished", "error", "index")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    started: Started
    chunk: Chunk
    finished: Finished
    error: _tree_pb2.Error
    index: int
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., error: _Optional[_Union[_tree_pb2.Error, _Mapping]] = ..., index: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("session_id", "model", "seed", "prompt_tokens", "rule", "lossy")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    model: str
    seed: int
    prompt_tokens: int
    rule: _draft_pb2.Rule
    lossy: bool
    def __init__(self, session_id: _Optional[str] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., rule: _Optional[_Union[_draft_pb2.Rule, str]] = ..., lossy: _Optional[bool] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "tokens", "pieces", "accepted", "logprobs")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[str]
    accepted: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, offset: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[str]] = ..., accepted: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenAlternative]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenAlternative, _Mapping]]] = ...) -> None: ...

class TokenAlternative(_message.Message):
    __slots__ = ("token", "logprob", "text")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    text: str
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage", "stop_token_id", "stop_string")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    stop_token_id: int
    stop_string: str
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stop_token_id: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "steps", "nodes_verified", "nodes_accepted", "nodes_stale", "first_token_s", "total_s", "cached_prompt_tokens", "nodes_drafted", "late_rounds", "draft_wait_s", "mean_width", "width_reason", "verified_by_depth", "accepted_by_depth")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NODES_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    NODES_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NODES_STALE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    LATE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_DEPTH_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    steps: int
    nodes_verified: int
    nodes_accepted: int
    nodes_stale: int
    first_token_s: float
    total_s: float
    cached_prompt_tokens: int
    nodes_drafted: int
    late_rounds: int
    draft_wait_s: float
    mean_width: float
    width_reason: WidthReason
    verified_by_depth: _containers.RepeatedScalarFieldContainer[int]
    accepted_by_depth: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., nodes_verified: _Optional[int] = ..., nodes_accepted: _Optional[int] = ..., nodes_stale: _Optional[int] = ..., first_token_s: _Optional[float] = ..., total_s: _Optional[float] = ..., cached_prompt_tokens: _Optional[int] = ..., nodes_drafted: _Optional[int] = ..., late_rounds: _Optional[int] = ..., draft_wait_s: _Optional[float] = ..., mean_width: _Optional[float] = ..., width_reason: _Optional[_Union[WidthReason, str]] = ..., verified_by_depth: _Optional[_Iterable[int]] = ..., accepted_by_depth: _Optional[_Iterable[int]] = ...) -> None: ...
