from draftwood.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrowthRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROWTH_RULE_UNSPECIFIED: _ClassVar[GrowthRule]
    GROWTH_RULE_CHAIN: _ClassVar[GrowthRule]

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_GREEDY: _ClassVar[Rule]
    RULE_SHARED_NOISE: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]
    RULE_TYPICAL: _ClassVar[Rule]
GROWTH_RULE_UNSPECIFIED: GrowthRule
GROWTH_RULE_CHAIN: GrowthRule
RULE_UNSPECIFIED: Rule
RULE_GREEDY: Rule
RULE_SHARED_NOISE: Rule
RULE_REJECTION: Rule
RULE_TYPICAL: Rule

class AttachRequest(_message.Message):
    __slots__ = ("session_id", "ticket", "verifier_address")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ticket: bytes
    verifier_address: str
    def __init__(self, session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ..., verifier_address: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("draft",)
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    draft: DraftInfo
    def __init__(self, draft: _Optional[_Union[DraftInfo, _Mapping]] = ...) -> None: ...

class DraftServiceWatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceWatchLoadResponse(_message.Message):
    __slots__ = ("incarnation", "sessions", "max_sessions", "nodes_drafted", "idle_share", "draining", "round_ms")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NODES_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    IDLE_SHARE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ROUND_MS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    sessions: int
    max_sessions: int
    nodes_drafted: int
    idle_share: float
    draining: bool
    round_ms: float
    def __init__(self, incarnation: _Optional[str] = ..., sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., nodes_drafted: _Optional[int] = ..., idle_share: _Optional[float] = ..., draining: _Optional[bool] = ..., round_ms: _Optional[float] = ...) -> None: ...

class DraftInfo(_message.Message):
    __slots__ = ("kind", "model", "incarnation", "tokenizer", "caps", "rules", "features")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CAPS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    model: str
    incarnation: str
    tokenizer: TokenizerInfo
    caps: Caps
    rules: _containers.RepeatedScalarFieldContainer[Rule]
    features: FeatureRequest
    def __init__(self, kind: _Optional[str] = ..., model: _Optional[str] = ..., incarnation: _Optional[str] = ..., tokenizer: _Optional[_Union[TokenizerInfo, _Mapping]] = ..., caps: _Optional[_Union[Caps, _Mapping]] = ..., rules: _Optional[_Iterable[_Union[Rule, str]]] = ..., features: _Optional[_Union[FeatureRequest, _Mapping]] = ...) -> None: ...

class FeatureRequest(_message.Message):
    __slots__ = ("layers", "hidden_size", "target")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    target: str
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., target: _Optional[str] = ...) -> None: ...

class TokenizerInfo(_message.Message):
    __slots__ = ("size", "sha256", "vocab_size", "special_ids")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_IDS_FIELD_NUMBER: _ClassVar[int]
    size: int
    sha256: bytes
    vocab_size: int
    special_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, size: _Optional[int] = ..., sha256: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., special_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Caps(_message.Message):
    __slots__ = ("max_nodes", "max_depth", "max_sessions", "max_message_bytes", "max_context_tokens")
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_nodes: int
    max_depth: int
    max_sessions: int
    max_message_bytes: int
    max_context_tokens: int
    def __init__(self, max_nodes: _Optional[int] = ..., max_depth: _Optional[int] = ..., max_sessions: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("hello", "joins", "growth", "leaves", "error")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    JOINS_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    joins: _containers.RepeatedCompositeFieldContainer[Join]
    growth: _tree_pb2.Growth
    leaves: _containers.RepeatedCompositeFieldContainer[Leave]
    error: _tree_pb2.Error
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., joins: _Optional[_Iterable[_Union[Join, _Mapping]]] = ..., growth: _Optional[_Union[_tree_pb2.Growth, _Mapping]] = ..., leaves: _Optional[_Iterable[_Union[Leave, _Mapping]]] = ..., error: _Optional[_Union[_tree_pb2.Error, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "draft")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    draft: DraftInfo
    def __init__(self, protocol_version: _Optional[int] = ..., draft: _Optional[_Union[DraftInfo, _Mapping]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("session_id", "ticket", "handle")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ticket: bytes
    handle: int
    def __init__(self, session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ..., handle: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("welcome", "starts", "commits", "stops", "drain", "errors", "features", "step_times", "drawing")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    DRAWING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    starts: _containers.RepeatedCompositeFieldContainer[Start]
    commits: Commits
    stops: _containers.RepeatedCompositeFieldContainer[Stop]
    drain: Drain
    errors: _containers.RepeatedCompositeFieldContainer[SessionError]
    features: _containers.RepeatedCompositeFieldContainer[FeatureChunk]
    step_times: StepTimes
    drawing: Drawing
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., commits: _Optional[_Union[Commits, _Mapping]] = ..., stops: _Optional[_Iterable[_Union[Stop, _Mapping]]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[SessionError, _Mapping]]] = ..., features: _Optional[_Iterable[_Union[FeatureChunk, _Mapping]]] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ..., drawing: _Optional[_Union[Drawing, _Mapping]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("rows", "ms")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    ms: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., ms: _Optional[_Iterable[float]] = ...) -> None: ...

class FeatureChunk(_message.Message):
    __slots__ = ("handle", "first", "count", "data")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first: int
    count: int
    data: bytes
    def __init__(self, handle: _Optional[int] = ..., first: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Drawing(_message.Message):
    __slots__ = ("max_depth", "growth")
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    max_depth: int
    growth: GrowthRule
    def __init__(self, max_depth: _Optional[int] = ..., growth: _Optional[_Union[GrowthRule, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "incarnation", "model", "tokenizer", "caps", "canary")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    CAPS_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation: str
    model: str
    tokenizer: TokenizerInfo
    caps: Caps
    canary: Canary
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., model: _Optional[str] = ..., tokenizer: _Optional[_Union[TokenizerInfo, _Mapping]] = ..., caps: _Optional[_Union[Caps, _Mapping]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("session_id", "ticket")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ticket: bytes
    def __init__(self, session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("handle", "epoch", "tokens", "seed", "rule", "temperature", "budget", "remaining_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    REMAINING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    epoch: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    rule: Rule
    temperature: float
    budget: int
    remaining_tokens: int
    def __init__(self, handle: _Optional[int] = ..., epoch: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ..., temperature: _Optional[float] = ..., budget: _Optional[int] = ..., remaining_tokens: _Optional[int] = ...) -> None: ...

class Commits(_message.Message):
    __slots__ = ("handle", "epoch", "length", "accepted", "count", "budget", "token", "node_id", "feature_count", "features")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FEATURE_COUNT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    handle: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    accepted: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    budget: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    node_id: _containers.RepeatedScalarFieldContainer[int]
    feature_count: _containers.RepeatedScalarFieldContainer[int]
    features: bytes
    def __init__(self, handle: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ..., length: _Optional[_Iterable[int]] = ..., accepted: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., budget: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., node_id: _Optional[_Iterable[int]] = ..., feature_count: _Optional[_Iterable[int]] = ..., features: _Optional[bytes] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("handle", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    error: _tree_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., error: _Optional[_Union[_tree_pb2.Error, _Mapping]] = ...) -> None: ...
