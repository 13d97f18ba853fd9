from draftwood.v1 import draft_pb2 as _draft_pb2
from draftwood.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Health(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEALTH_UNSPECIFIED: _ClassVar[Health]
    HEALTH_STARTING: _ClassVar[Health]
    HEALTH_READY: _ClassVar[Health]
    HEALTH_LOST: _ClassVar[Health]
    HEALTH_DRAINING: _ClassVar[Health]
HEALTH_UNSPECIFIED: Health
HEALTH_STARTING: Health
HEALTH_READY: Health
HEALTH_LOST: Health
HEALTH_DRAINING: Health

class RouterServiceGenerateRequest(_message.Message):
    __slots__ = ("model", "generation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    generation: _verifier_pb2.Generation
    def __init__(self, model: _Optional[str] = ..., generation: _Optional[_Union[_verifier_pb2.Generation, _Mapping]] = ...) -> None: ...

class RouterServiceGenerateResponse(_message.Message):
    __slots__ = ("event",)
    EVENT_FIELD_NUMBER: _ClassVar[int]
    event: _verifier_pb2.GenerationEvent
    def __init__(self, event: _Optional[_Union[_verifier_pb2.GenerationEvent, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: Status
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_verifier_pb2.ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[_verifier_pb2.ModelInfo, _Mapping]]] = ...) -> None: ...

class ScalePoolRequest(_message.Message):
    __slots__ = ("counts",)
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.ScalarMap[str, int]
    def __init__(self, counts: _Optional[_Mapping[str, int]] = ...) -> None: ...

class ScalePoolResponse(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("incarnation", "verifiers", "drafts", "requests", "requests_total", "requests_failed", "draft_reattachments", "verifier_migrations", "pools")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierStatus]
    drafts: _containers.RepeatedCompositeFieldContainer[DraftStatus]
    requests: int
    requests_total: int
    requests_failed: int
    draft_reattachments: int
    verifier_migrations: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    def __init__(self, incarnation: _Optional[str] = ..., verifiers: _Optional[_Iterable[_Union[VerifierStatus, _Mapping]]] = ..., drafts: _Optional[_Iterable[_Union[DraftStatus, _Mapping]]] = ..., requests: _Optional[int] = ..., requests_total: _Optional[int] = ..., requests_failed: _Optional[int] = ..., draft_reattachments: _Optional[int] = ..., verifier_migrations: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("name", "role", "wanted", "present", "ready", "draining", "min", "max", "error", "decision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    wanted: int
    present: int
    ready: int
    draining: int
    min: int
    max: int
    error: str
    decision: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., wanted: _Optional[int] = ..., present: _Optional[int] = ..., ready: _Optional[int] = ..., draining: _Optional[int] = ..., min: _Optional[int] = ..., max: _Optional[int] = ..., error: _Optional[str] = ..., decision: _Optional[str] = ...) -> None: ...

class VerifierStatus(_message.Message):
    __slots__ = ("address", "health", "model", "load", "sessions", "policy", "decision")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    address: str
    health: Health
    model: _verifier_pb2.ModelInfo
    load: _verifier_pb2.VerifierServiceWatchLoadResponse
    sessions: int
    policy: _verifier_pb2.Policy
    decision: str
    def __init__(self, address: _Optional[str] = ..., health: _Optional[_Union[Health, str]] = ..., model: _Optional[_Union[_verifier_pb2.ModelInfo, _Mapping]] = ..., load: _Optional[_Union[_verifier_pb2.VerifierServiceWatchLoadResponse, _Mapping]] = ..., sessions: _Optional[int] = ..., policy: _Optional[_Union[_verifier_pb2.Policy, _Mapping]] = ..., decision: _Optional[str] = ...) -> None: ...

class DraftStatus(_message.Message):
    __slots__ = ("address", "health", "draft", "load", "sessions")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    address: str
    health: Health
    draft: _draft_pb2.DraftInfo
    load: _draft_pb2.DraftServiceWatchLoadResponse
    sessions: int
    def __init__(self, address: _Optional[str] = ..., health: _Optional[_Union[Health, str]] = ..., draft: _Optional[_Union[_draft_pb2.DraftInfo, _Mapping]] = ..., load: _Optional[_Union[_draft_pb2.DraftServiceWatchLoadResponse, _Mapping]] = ..., sessions: _Optional[int] = ...) -> None: ...
