from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Growth(_message.Message):
    __slots__ = ("handle", "epoch", "first_id", "parent_base", "count", "complete", "parent", "token", "score", "drawn", "q_parent", "q_count", "q_token", "q_prob")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_BASE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    Q_PARENT_FIELD_NUMBER: _ClassVar[int]
    Q_COUNT_FIELD_NUMBER: _ClassVar[int]
    Q_TOKEN_FIELD_NUMBER: _ClassVar[int]
    Q_PROB_FIELD_NUMBER: _ClassVar[int]
    handle: _containers.RepeatedScalarFieldContainer[int]
    epoch: _containers.RepeatedScalarFieldContainer[int]
    first_id: _containers.RepeatedScalarFieldContainer[int]
    parent_base: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    complete: _containers.RepeatedScalarFieldContainer[bool]
    parent: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    score: _containers.RepeatedScalarFieldContainer[float]
    drawn: _containers.RepeatedScalarFieldContainer[int]
    q_parent: _containers.RepeatedScalarFieldContainer[int]
    q_count: _containers.RepeatedScalarFieldContainer[int]
    q_token: _containers.RepeatedScalarFieldContainer[int]
    q_prob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, handle: _Optional[_Iterable[int]] = ..., epoch: _Optional[_Iterable[int]] = ..., first_id: _Optional[_Iterable[int]] = ..., parent_base: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., complete: _Optional[_Iterable[bool]] = ..., parent: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., score: _Optional[_Iterable[float]] = ..., drawn: _Optional[_Iterable[int]] = ..., q_parent: _Optional[_Iterable[int]] = ..., q_count: _Optional[_Iterable[int]] = ..., q_token: _Optional[_Iterable[int]] = ..., q_prob: _Optional[_Iterable[float]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...
