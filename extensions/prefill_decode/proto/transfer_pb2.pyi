from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("identity", "token_ids", "num_held_blocks", "tenant", "cache_salt", "priority", "machine", "offers")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    identity: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_held_blocks: int
    tenant: str
    cache_salt: bytes
    priority: int
    machine: str
    offers: bool
    def __init__(self, identity: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_held_blocks: _Optional[int] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., machine: _Optional[str] = ..., offers: _Optional[bool] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("pid", "fd", "nonce", "size")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    nonce: bytes
    size: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., nonce: _Optional[bytes] = ..., size: _Optional[int] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("digest", "offset", "uuid")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    digest: int
    offset: int
    uuid: int
    def __init__(self, digest: _Optional[int] = ..., offset: _Optional[int] = ..., uuid: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("lease_id", "lease_s", "pieces", "shared_memory", "num_cached_tokens", "transfer_address", "data_address")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_s: float
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    shared_memory: SharedMemory
    num_cached_tokens: int
    transfer_address: str
    data_address: str
    def __init__(self, lease_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., transfer_address: _Optional[str] = ..., data_address: _Optional[str] = ...) -> None: ...

class ReadPieceRequest(_message.Message):
    __slots__ = ("lease_id", "number")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    number: int
    def __init__(self, lease_id: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ReadPieceResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "num_taken")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TAKEN_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    num_taken: int
    def __init__(self, lease_id: _Optional[str] = ..., num_taken: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
