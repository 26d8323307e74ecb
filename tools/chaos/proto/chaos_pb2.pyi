from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class GetInvariantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInvariantsResponse(_message.Message):
    __slots__ = ("enabled", "checks_total", "breaches_total", "breach", "requests_accepted_total", "requests_finished_total", "requests_failed_total", "requests_cancelled_total", "requests_live", "generations_started_total", "generations_finished_total", "generations_failed_total", "generations_cancelled_total", "generations_live", "kv_blocks", "kv_blocks_in_use", "kv_blocks_cached", "asyncio_tasks", "threads", "open_files", "rss_bytes")
    ENABLED_FIELD_NUMBER: _ClassVar[int]
    CHECKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BREACHES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BREACH_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_ACCEPTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_CANCELLED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_LIVE_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_STARTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FINISHED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FAILED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_CANCELLED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_LIVE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    ASYNCIO_TASKS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    enabled: bool
    checks_total: int
    breaches_total: int
    breach: str
    requests_accepted_total: int
    requests_finished_total: int
    requests_failed_total: int
    requests_cancelled_total: int
    requests_live: int
    generations_started_total: int
    generations_finished_total: int
    generations_failed_total: int
    generations_cancelled_total: int
    generations_live: int
    kv_blocks: int
    kv_blocks_in_use: int
    kv_blocks_cached: int
    asyncio_tasks: int
    threads: int
    open_files: int
    rss_bytes: int
    def __init__(self, enabled: _Optional[bool] = ..., checks_total: _Optional[int] = ..., breaches_total: _Optional[int] = ..., breach: _Optional[str] = ..., requests_accepted_total: _Optional[int] = ..., requests_finished_total: _Optional[int] = ..., requests_failed_total: _Optional[int] = ..., requests_cancelled_total: _Optional[int] = ..., requests_live: _Optional[int] = ..., generations_started_total: _Optional[int] = ..., generations_finished_total: _Optional[int] = ..., generations_failed_total: _Optional[int] = ..., generations_cancelled_total: _Optional[int] = ..., generations_live: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_blocks_in_use: _Optional[int] = ..., kv_blocks_cached: _Optional[int] = ..., asyncio_tasks: _Optional[int] = ..., threads: _Optional[int] = ..., open_files: _Optional[int] = ..., rss_bytes: _Optional[int] = ...) -> None: ...

class SetFaultPlanRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: str
    def __init__(self, plan: _Optional[str] = ...) -> None: ...

class SetFaultPlanResponse(_message.Message):
    __slots__ = ("acted",)
    ACTED_FIELD_NUMBER: _ClassVar[int]
    acted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, acted: _Optional[_Iterable[int]] = ...) -> None: ...
