"""Keeps files and batches on disk, so that a crash loses nothing and repeats nothing. Knows no engine.

FOLDER/files has the contents of files, and FOLDER/batches.sqlite all else. Each change is one transaction that is on
disk when it returns (WAL, synchronous=FULL). All methods but `run` and `close_store` belong to the store's one thread.
A line's result is stored only while the line has none and its batch is in progress, so no line has two.
"""

import asyncio
import collections
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import secrets
import sqlite3
import time
from typing import Any

from engine.errors import ConfigError
from server.errors import Draining
from server.http.batches import batch_lines
from server.http.batches.batch_lines import ReadLines
from server.http.error_responses import Refused

MAX_FILES = 10_000  # of a tenant
MAX_UNFINISHED = 100  # batches of a tenant
_MAX_KEPT = 1000  # batches of a tenant; the oldest ended ones go first
_MAX_SHOWN_ERRORS = 100  # in a batch's own errors; the error file has all
WINDOW_S = 24 * 3600
# Of one transaction or one read.
_CHUNK = 1000
_MAX_PENDING_BYTES = 8 << 20
_MAX_PENDING = 64
_VERSION = 1
_SCHEMA = """
CREATE TABLE files (
  seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
  bytes INTEGER NOT NULL, created_at INTEGER NOT NULL
);
CREATE INDEX files_of ON files (tenant, seq);
CREATE TABLE batches (
  seq INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL, endpoint TEXT NOT NULL,
  input_file_id TEXT NOT NULL, metadata TEXT, status TEXT NOT NULL, ending TEXT, errors TEXT, output_file_id TEXT,
  error_file_id TEXT, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER,
  finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER,
  cancelled_at INTEGER, total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0,
  failed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_of ON batches (tenant, seq);
CREATE TABLE lines (
  batch INTEGER NOT NULL, number INTEGER NOT NULL, custom_id TEXT, offset INTEGER NOT NULL, size INTEGER NOT NULL,
  state INTEGER NOT NULL, result TEXT, PRIMARY KEY (batch, number)
);
CREATE UNIQUE INDEX custom_ids ON lines (batch, custom_id);
CREATE INDEX pending ON lines (batch, number) WHERE state = 0;
"""
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
# States of a line. Refused lines go into the error file.
_PENDING, _ANSWERED, _REFUSED = 0, 1, 2
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_UNFINISHED_SQL = f"status IN {UNFINISHED}"
_UNANSWERED = {
  "expired": ("batch_expired", "the completion window ended before this request ran; send it in a new batch"),
  "cancelled": ("batch_cancelled", "the batch was cancelled before this request ran; send it in a new batch"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchLimits:
  """Limits of the store. Attributes: max_file_bytes: of one input file. max_tenant_bytes: of a tenant's files."""

  max_file_bytes: int
  max_tenant_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PendingLine:
  """A line to run. Attributes: number, custom_id: as in the file. raw: the line."""

  number: int
  custom_id: str
  raw: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LineResult:
  """What a line became. Attributes: seq: of the batch. number: of the line. is_error: which file. text: its line."""

  seq: int
  number: int
  is_error: bool
  text: str


def wall_time() -> int:
  """Seconds since 1970: what clients see, and the clock of the completion window, which outlives the process."""
  return int(time.time())


class BatchStore:
  """The files and batches of a server."""

  def __init__(self, folder: str, limits: BatchLimits):
    """Opens the folder, or makes it.

    Raises:
      ConfigError: it cannot be used, another server uses it, or another version wrote it.
    """
    self.limits = limits
    self._folder = pathlib.Path(folder)
    self._files = self._folder / "files"
    try:
      self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
      self._files.mkdir(mode=0o700, exist_ok=True)
      self._lock = open(self._folder / "lock", "w")  # noqa: SIM115  (open as long as the store)
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ConfigError(
        f"batch_dir={folder} is in use by another server; give each server its own --batch_dir"
      ) from None
    except OSError as error:
      raise ConfigError(
        f"batch_dir={folder} cannot be used: {error.strerror}; set --batch_dir to a folder that can be written"
      ) from None
    try:
      self._open_database(folder)
    except (sqlite3.Error, OSError) as error:
      raise ConfigError(
        f"batch_dir={folder} cannot be used: {error}; free space, restore it, or set another --batch_dir"
      ) from None
    self._thread: concurrent.futures.ThreadPoolExecutor | None = concurrent.futures.ThreadPoolExecutor(
      1, thread_name_prefix="batches"
    )

  def _open_database(self, folder: str) -> None:
    path = self._folder / "batches.sqlite"
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # prompts are nobody else's; SQLite's other files follow it
    self._db = sqlite3.connect(path, check_same_thread=False, autocommit=True)
    self._db.row_factory = sqlite3.Row
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=1000"):
      self._db.execute(f"PRAGMA {pragma}")
    version = self._db.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _VERSION):
      raise ConfigError(
        f"batch_dir={folder} has version {version}, this server reads {_VERSION}; serve with the version of Sluice "
        "that wrote it, or set another --batch_dir"
      )
    if version == 0:
      self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
    # Uploads and outputs that a crash cut have no row.
    known = {row["id"] for row in self._db.execute("SELECT id FROM files")}
    for path in self._files.iterdir():
      if _FILE_ID.fullmatch(path.name) and path.name not in known:
        path.unlink()

  async def run[**P, T](self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a method on the store's thread. Once begun, it goes on if the caller is cancelled.

    Raises:
      Draining: the store is closed.
    """
    if self._thread is None:
      raise Draining("the server is shutting down; send the request to another server")
    return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args, **kwargs))

  def close_store(self) -> None:
    """Finishes what has begun, and closes the folder. A second call does nothing."""
    if self._thread is not None:
      thread, self._thread = self._thread, None
      thread.shutdown(wait=True)
      self._db.close()
      self._lock.close()

  def path_of(self, file_id: str) -> pathlib.Path:
    """Returns the path of a file's content."""
    return self._files / file_id

  # Files.

  def make_file_id(self) -> str:
    """Returns the id of a new file."""
    return f"file-{secrets.token_hex(12)}"

  def check_space(self, tenant: str, num_bytes: int) -> None:
    """Raises Refused if the tenant's files and `num_bytes` more exceed a limit."""
    row = self._db.execute("SELECT count(*) n, total(bytes) size FROM files WHERE tenant=?", (tenant,)).fetchone()
    if row["n"] >= MAX_FILES:
      raise Refused(
        413, f"there are {row['n']} files, the limit is {MAX_FILES}: delete some first", code="too_many_files"
      )
    size, most = int(row["size"]) + num_bytes, self.limits.max_tenant_bytes
    if size > most:
      raise Refused(
        413,
        f"files would have {size} bytes, the limit is {most}: delete some first, or raise --max_batch_storage_mb",
        code="storage_limit",
      )

  def add_file(self, file_id: str, tenant: str, name: str, purpose: str, *, check: bool) -> sqlite3.Row:
    """Adds a file whose content is at `path_of`; makes the content durable first. Returns its row.

    Args:
      check: whether the tenant's limits apply.
    """
    path = self.path_of(file_id)
    num_bytes = path.stat().st_size
    if check:
      self.check_space(tenant, num_bytes)
    _sync(path)
    _sync(self._files)
    self._db.execute(
      "INSERT INTO files (id, tenant, name, purpose, bytes, created_at) VALUES (?, ?, ?, ?, ?, ?)",
      (file_id, tenant, name, purpose, num_bytes, wall_time()),
    )
    return self.find_file(file_id, tenant)

  def find_file(self, file_id: str, tenant: str) -> sqlite3.Row:
    """Returns a tenant's file. Raises Refused: the tenant has no such file."""
    return self._find("files", file_id, tenant)

  def list_files(
    self, tenant: str, purpose: str | None, after: str | None, limit: int, oldest_first: bool
  ) -> list[sqlite3.Row]:
    """Returns up to `limit` + 1 files after one of them."""
    more = ("AND purpose=?", (purpose,)) if purpose is not None else ("", ())
    return self._list("files", tenant, after, limit, *more, oldest_first=oldest_first)

  def delete_file(self, file_id: str, tenant: str) -> None:
    """Deletes a file. Raises Refused: the tenant has no such file, or an unfinished batch reads it."""
    self.find_file(file_id, tenant)
    user = self._db.execute(
      f"SELECT id FROM batches WHERE tenant=? AND input_file_id=? AND {_UNFINISHED_SQL}", (tenant, file_id)
    ).fetchone()
    if user is not None:
      raise Refused(409, f"the file is the input of {user['id']}; wait for its end, or cancel it", code="file_in_use")
    self._db.execute("DELETE FROM files WHERE id=?", (file_id,))
    self.path_of(file_id).unlink(missing_ok=True)

  # Batches.

  def add_batch(self, tenant: str, input_file_id: str, endpoint: str, metadata: dict[str, str] | None) -> sqlite3.Row:
    """Queues a batch; returns its row.

    Raises:
      Refused: the tenant has no such input file, or too many unfinished batches.
    """
    if self.find_file(input_file_id, tenant)["purpose"] != "batch":
      raise Refused(400, "input_file_id is not a file of purpose=batch; upload one", code="invalid_input_file")
    count = self._db.execute(
      f"SELECT count(*) FROM batches WHERE tenant=? AND {_UNFINISHED_SQL}", (tenant,)
    ).fetchone()[0]
    if count >= MAX_UNFINISHED:
      raise Refused(
        413,
        f"{count} batches are not finished, which is the limit; wait for one, or cancel it",
        code="too_many_batches",
      )
    batch_id, now = f"batch_{secrets.token_hex(12)}", wall_time()
    with self._transaction():
      self._db.execute(
        "INSERT INTO batches (id, tenant, endpoint, input_file_id, metadata, status, created_at, expires_at) "
        "VALUES (?, ?, ?, ?, ?, 'validating', ?, ?)",
        (batch_id, tenant, endpoint, input_file_id, metadata and json.dumps(metadata), now, now + WINDOW_S),
      )
      self._db.execute(
        f"DELETE FROM batches WHERE tenant=? AND NOT {_UNFINISHED_SQL} AND seq <= "
        "(SELECT seq FROM batches WHERE tenant=? ORDER BY seq DESC LIMIT 1 OFFSET ?)",
        (tenant, tenant, _MAX_KEPT),
      )
    return self.find_batch(batch_id, tenant)

  def find_batch(self, batch_id: str, tenant: str) -> sqlite3.Row:
    """Returns a tenant's batch. Raises Refused: the tenant has no such batch."""
    return self._find("batches", batch_id, tenant)

  def list_batches(self, tenant: str, after: str | None, limit: int) -> list[sqlite3.Row]:
    """Returns up to `limit` + 1 batches, newest first, after one of them."""
    return self._list("batches", tenant, after, limit)

  def cancel_batch(self, batch_id: str, tenant: str) -> sqlite3.Row:
    """Begins to cancel a batch, after which no line gets a result; returns its row.

    Raises:
      Refused: the tenant has no such batch, or it has ended or is about to.
    """
    status = self.find_batch(batch_id, tenant)["status"]
    if status not in ("validating", "in_progress", "cancelling"):
      raise Refused(
        409, f"the batch is {status}, and only validating and in_progress ones can be cancelled", code="batch_ended"
      )
    self._db.execute(
      "UPDATE batches SET status='cancelling', ending='cancelled', cancelling_at=coalesce(cancelling_at, ?) WHERE id=?",
      (wall_time(), batch_id),
    )
    return self.find_batch(batch_id, tenant)

  # The work on batches.

  def unfinished_batches(self) -> list[sqlite3.Row]:
    """Returns all tenants' unfinished batches, oldest first."""
    return self._db.execute(f"SELECT * FROM batches WHERE {_UNFINISHED_SQL} ORDER BY seq").fetchall()

  def batch_of(self, seq: int) -> sqlite3.Row:
    """Returns a batch by its number in the store."""
    return self._db.execute("SELECT * FROM batches WHERE seq=?", (seq,)).fetchone()

  def drop_lines(self, seq: int) -> bool:
    """Drops some lines of a batch, and returns whether there may be more."""
    return (
      self._db.execute(
        "DELETE FROM lines WHERE rowid IN (SELECT rowid FROM lines WHERE batch=? LIMIT ?)", (seq, _CHUNK)
      ).rowcount
      == _CHUNK
    )

  def leftover_batches(self) -> list[int]:
    """Returns batches that have ended, or been forgotten, and still have lines."""
    rows = self._db.execute(
      "SELECT DISTINCT lines.batch FROM lines LEFT JOIN batches ON seq=lines.batch "
      f"WHERE status IS NULL OR NOT {_UNFINISHED_SQL}"
    )
    return [row[0] for row in rows]

  def read_input(self, batch: sqlite3.Row, max_line_bytes: int, offset: int, number: int) -> ReadLines:
    """Stores the next lines of a validating batch; a bad line is stored with its error.

    Args:
      batch: the batch.
      max_line_bytes: longer lines are bad.
      offset, number: of the first line to read.
    """
    found = batch_lines.read_lines(
      self.path_of(batch["input_file_id"]), batch["endpoint"], max_line_bytes, offset, number
    )
    seq = batch["seq"]
    with self._transaction():
      for line in found.lines:
        text = None
        if line.code:
          text = batch_lines.write_failure(None, line.code, line.message, line.number)
        values = (seq, line.number, line.custom_id, line.offset, line.size)
        state = _REFUSED if line.code else _PENDING
        insert = "INTO lines (batch, number, custom_id, offset, size, state, result) VALUES (?, ?, ?, ?, ?, ?, ?)"
        added = self._db.execute(f"INSERT OR IGNORE {insert}", (*values, state, text)).rowcount
        if not added:
          text = batch_lines.write_failure(
            line.custom_id, "duplicate_custom_id", "an earlier line has this custom_id; send another", line.number
          )
          self._db.execute(f"INSERT {insert}", (seq, line.number, None, line.offset, line.size, _REFUSED, text))
    return found

  def end_validation(self, seq: int) -> sqlite3.Row:
    """Ends the validation: the batch is in progress, or about to fail if a line is bad or there is none."""
    counts = self._db.execute(
      "SELECT count(*) total, total(state=?) bad FROM lines WHERE batch=?", (_REFUSED, seq)
    ).fetchone()
    total, bad, now = counts["total"], int(counts["bad"]), wall_time()
    if total and not bad:
      self._db.execute(
        "UPDATE batches SET status='in_progress', in_progress_at=?, total=? WHERE seq=? AND status='validating'",
        (now, total, seq),
      )
      return self.batch_of(seq)
    shown = []
    if not total:
      message = "the input file has no request; send one JSON object a line"
      shown.append({"code": "empty_file", "line": None, "message": message, "param": None})
    bad_lines = "SELECT number, result FROM lines WHERE batch=? AND state=? ORDER BY number LIMIT ?"
    for row in self._db.execute(bad_lines, (seq, _REFUSED, _MAX_SHOWN_ERRORS)):
      error = json.loads(row["result"])["error"]
      shown.append({"code": error["code"], "line": row["number"], "message": error["message"], "param": None})
    if bad > _MAX_SHOWN_ERRORS:
      message = f"{bad - _MAX_SHOWN_ERRORS} more lines are bad; the error file has all of them"
      shown.append({"code": "more_errors", "line": None, "message": message, "param": None})
    self._begin_ending(seq, "failed", json.dumps(shown))
    return self.batch_of(seq)

  def fail_batch(self, seq: int, code: str, message: str) -> None:
    """Begins to end a batch that cannot be read."""
    self._begin_ending(seq, "failed", json.dumps([{"code": code, "line": None, "message": message, "param": None}]))

  def begin_ending(self, seq: int, ending: str) -> None:
    """Begins to end a batch, after which no line gets a result. Args: ending: the status that it will have."""
    self._begin_ending(seq, ending, None)

  def _begin_ending(self, seq: int, ending: str, errors: str | None) -> None:
    self._db.execute(
      "UPDATE batches SET status='finalizing', ending=?, errors=?, finalizing_at=? "
      "WHERE seq=? AND status IN ('validating', 'in_progress')",
      (ending, errors, wall_time(), seq),
    )

  def pending_lines(self, batch: sqlite3.Row, after: int) -> list[PendingLine]:
    """Returns the next lines without a result. Args: after: the number of the last line that is known."""
    rows = self._db.execute(
      "SELECT number, custom_id, offset, size FROM lines WHERE batch=? AND number>? AND state=0 "
      "ORDER BY number LIMIT ?",
      (batch["seq"], after, _MAX_PENDING),
    ).fetchall()
    lines: list[PendingLine] = []
    num_bytes = 0
    with self.path_of(batch["input_file_id"]).open("rb") as file:
      for row in rows:
        if lines and num_bytes + row["size"] > _MAX_PENDING_BYTES:
          break
        file.seek(row["offset"])
        lines.append(PendingLine(row["number"], row["custom_id"], file.read(row["size"])))
        num_bytes += row["size"]
    return lines

  def add_results(self, results: Sequence[LineResult]) -> None:
    """Stores results in one transaction, except of lines that have one or whose batch is no longer in progress."""
    counts: collections.Counter[tuple[int, bool]] = collections.Counter()
    with self._transaction():
      for result in results:
        counts[result.seq, result.is_error] += self._db.execute(
          "UPDATE lines SET state=?, result=? WHERE batch=? AND number=? AND state=0 "
          "AND EXISTS (SELECT 1 FROM batches WHERE seq=lines.batch AND status='in_progress')",
          (_REFUSED if result.is_error else _ANSWERED, result.text, result.seq, result.number),
        ).rowcount
      for (seq, is_error), count in counts.items():
        column = "failed" if is_error else "completed"
        self._db.execute(f"UPDATE batches SET {column}={column}+? WHERE seq=?", (count, seq))

  def write_outputs(self, batch: sqlite3.Row, file_ids: tuple[str, str], after: int) -> int | None:
    """Appends the next lines of an ending batch to its output file and its error file.

    Args:
      batch: the batch.
      file_ids: of the two files.
      after: the number of the last line that is written; 0 begins the files.

    Returns:
      The number of the last line that is written now; None if there was none left.
    """
    rows = self._db.execute(
      "SELECT number, custom_id, state, result FROM lines WHERE batch=? AND number>? ORDER BY number LIMIT ?",
      (batch["seq"], after, _CHUNK),
    ).fetchall()
    if not rows:
      return None
    mode = "a" if after else "w"
    with self.path_of(file_ids[0]).open(mode) as answers, self.path_of(file_ids[1]).open(mode) as errors:
      for row in rows:
        if row["state"] == _PENDING and batch["ending"] not in _UNANSWERED:
          continue  # a good line beside bad ones: nothing ran
        text = row["result"] or batch_lines.write_failure(row["custom_id"], *_UNANSWERED[batch["ending"]])
        (answers if row["state"] == _ANSWERED else errors).write(text + "\n")
    return rows[-1]["number"]

  def end_batch(self, batch: sqlite3.Row, file_ids: tuple[str, str]) -> None:
    """Ends a batch whose output files are written, in one transaction with the files' own rows."""
    with self._transaction():
      named: list[str | None] = []
      for file_id, name in zip(file_ids, ("output", "error"), strict=True):
        path = self.path_of(file_id)
        if path.exists() and path.stat().st_size:
          self.add_file(file_id, batch["tenant"], f"{batch['id']}_{name}.jsonl", "batch_output", check=False)
          named.append(file_id)
        else:
          path.unlink(missing_ok=True)
          named.append(None)
      ending = batch["ending"]
      self._db.execute(
        f"UPDATE batches SET status=?, {ending}_at=?, output_file_id=?, error_file_id=? WHERE seq=?",
        (ending, wall_time(), *named, batch["seq"]),
      )

  def _transaction(self) -> "_Transaction":
    return _Transaction(self._db)

  def _find(self, table: str, row_id: str, tenant: str) -> sqlite3.Row:
    row = self._db.execute(f"SELECT * FROM {table} WHERE id=? AND tenant=?", (row_id, tenant)).fetchone()
    if row is None:
      kind = {"files": "file", "batches": "batch"}[table]
      raise Refused(404, f"there is no such {kind}; list them with GET /v1/{table}", code=f"{kind}_not_found")
    return row

  def _list(
    self,
    table: str,
    tenant: str,
    after: str | None,
    limit: int,
    more_sql: str = "",
    more: tuple[Any, ...] = (),
    *,
    oldest_first: bool = False,
  ) -> list[sqlite3.Row]:
    sign, order = (">", "ASC") if oldest_first else ("<", "DESC")
    if after is not None:
      more_sql, more = f"{more_sql} AND seq{sign}?", (*more, self._find(table, after, tenant)["seq"])
    return self._db.execute(
      f"SELECT * FROM {table} WHERE tenant=? {more_sql} ORDER BY seq {order} LIMIT ?", (tenant, *more, limit + 1)
    ).fetchall()


class _Transaction:
  """A transaction that is on disk when its block ends, or nowhere if it raises."""

  def __init__(self, db: sqlite3.Connection):
    self._db = db

  def __enter__(self) -> None:
    self._db.execute("BEGIN IMMEDIATE")

  def __exit__(self, kind: object, *_: object) -> None:
    if kind is None:
      try:
        self._db.execute("COMMIT")
        return
      except sqlite3.Error:
        if self._db.in_transaction:
          self._db.execute("ROLLBACK")
        raise
    if self._db.in_transaction:  # SQLite itself rolls back after some errors
      self._db.execute("ROLLBACK")


def _sync(path: pathlib.Path) -> None:
  """Makes a file's content, or a folder's entries, durable."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
