"""A server process that is killed at any instant: after the next start every line is answered exactly once."""

import contextlib
import json
import pathlib
import random
import signal
import subprocess

import httpx
import openai
import pytest

from tests.server.http.batches.batch_client import create, make_line, read, wait
from tests.server.test_main import DEMO, start, wait_for_file

NUM_LINES = 300


class Killed:
  """A server over one folder that dies again and again, and what its client knows of its batches.

  Attributes:
    made, ended: ids of batches.
    seen: the most finished lines that a response of a batch has shown.
    num_interrupted: kills that came while a batch was unfinished.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self.made: set[str] = set()
    self.ended: set[str] = set()
    self.seen: dict[str, int] = {}
    self.num_interrupted = 0

  @contextlib.contextmanager
  def serving(self):
    port_file = self._folder / "port"
    port_file.unlink(missing_ok=True)
    log = (self._folder / "log").open("w")
    process = start(
      f"--model={DEMO}",
      "--fake_device",
      "--fake_step_ms=5",
      "--max_num_seqs=16",
      "--port=0",
      f"--http_port_file={port_file}",
      f"--batch_dir={self._folder / 'batches'}",
      stderr=log,
    )
    try:
      try:
        port = wait_for_file(port_file, process).strip()
      except AssertionError:
        raise AssertionError((self._folder / "log").read_text()[-3000:]) from None
      with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0, timeout=60) as client:
        yield process, client
    finally:
      process.kill()
      process.wait()
      log.close()

  def look(self, client: openai.OpenAI) -> bool:
    """Looks at each batch; returns whether one has not ended."""
    for batch_id in self.made:
      batch = client.batches.retrieve(batch_id)
      counts = batch.request_counts
      assert counts.completed + counts.failed >= self.seen[batch_id], "a finished line was lost"
      self.seen[batch_id] = counts.completed + counts.failed
      if batch.status == "completed":
        self.ended.add(batch_id)
    return bool(self.made - self.ended)

  def live_once(self, delay_s: float) -> None:
    """Serves for a while and is killed in the middle of anything."""
    with self.serving() as (process, client):
      killer = subprocess.Popen(["sh", "-c", f"sleep {delay_s:.4f}; kill -9 {process.pid}"])
      with contextlib.suppress(openai.APIConnectionError, httpx.TransportError):
        while True:
          if not self.look(client):
            batch = create(client, [make_line(f"{number}", make_body(number)) for number in range(NUM_LINES)])
            self.made.add(batch.id)
            self.seen[batch.id] = 0
      killer.wait()
      assert process.wait() == -signal.SIGKILL
    self.num_interrupted += bool(self.made - self.ended)

  def check_answers(self) -> None:
    """Lets every batch end, and looks for each line in the outputs. A second start changes nothing."""
    answers = []
    for _ in range(2):
      with self.serving() as (_, client):
        assert {batch.id for batch in client.batches.list(limit=100)} >= self.made
        for batch in client.batches.list(limit=100):
          batch = wait(client, batch.id)
          assert batch.status == "completed"
          good, bad = read(client, batch.output_file_id), read(client, batch.error_file_id)
          assert [int(each["custom_id"]) for each in good] == [n for n in range(NUM_LINES) if n % 10]
          assert [int(each["custom_id"]) for each in bad] == [n for n in range(NUM_LINES) if n % 10 == 0]
          counts = batch.request_counts
          assert (counts.total, counts.completed, counts.failed) == (NUM_LINES, len(good), len(bad))
          answers.append((batch.id, good, bad))
        # An upload that was cut left nothing.
        files = {path.name for path in (self._folder / "batches" / "files").iterdir()}
        assert files == {file.id for file in client.files.list()}
    half = len(answers) // 2
    assert json.dumps(answers[:half]) == json.dumps(answers[half:])


def make_body(number: int) -> dict:
  messages = [{"role": "user", "content": f"line {number}"}]
  return {"messages": messages, "max_tokens": 8, "seed": number, "top_p": 0.5 if number % 10 else 5}


@pytest.mark.parametrize("num_kills", [2, pytest.param(100, marks=pytest.mark.long)])
def test_every_line_is_answered_once_whenever_the_server_is_killed(tmp_path, num_kills):
  killed, rng = Killed(tmp_path), random.Random(num_kills)
  for _ in range(num_kills):
    killed.live_once(rng.random())
  killed.check_answers()
  assert killed.num_interrupted >= max(1, num_kills // 4), "the kills came when nothing was at stake"
  print(f"{num_kills} kills, {killed.num_interrupted} with an unfinished batch, {len(killed.made)} batches")
