"""Files and batches through the real openai client, over real sockets: answers, limits, tenants, cancelling."""

import asyncio
from collections.abc import Iterator
import contextlib
import pathlib
import socket
from typing import Any

from absl.testing import flagsaver
import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
import jsonschema
import openai
import pytest

from engine.errors import ConfigError
from server import flags
from server.http.batches import batch_runner, batch_store
from server.http.batches.batch_lines import BATCH_PRIORITY
from server.lifecycle.host import HostOptions
from server.proto import sluice_pb2 as pb
from tests.server.harness import Served, running, tiny_config
from tests.server.http.batches.batch_client import BODY, CHAT, create, make_line, read, upload, wait
from tests.server.http.conftest import url_of


@contextlib.contextmanager
def serving(tokenizer, folder: pathlib.Path, **more: Any) -> Iterator[tuple[Served, openai.OpenAI]]:
  config = more.pop("config", None)
  with (
    running(tokenizer, host=HostOptions(http_port=0, batch_dir=str(folder), **more), config=config) as served,
    openai.OpenAI(base_url=f"{url_of(served)}/v1", api_key="unused", max_retries=0, timeout=60) as client,
  ):
    yield served, client


@pytest.fixture(scope="module")
def both(tokenizer, tmp_path_factory) -> Iterator[tuple[Served, openai.OpenAI]]:
  with serving(tokenizer, tmp_path_factory.mktemp("batches")) as found:
    yield found


@pytest.fixture(scope="module")
def sdk(both) -> openai.OpenAI:
  return both[1]


def test_a_batch_gives_what_single_requests_give(sdk):
  prompts = [f"the cat {number}" for number in range(30)]
  lines = [make_line(f"id-{prompt}", BODY | {"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts]
  made = sdk.batches.create(
    input_file_id=upload(sdk, lines), endpoint=CHAT, completion_window="24h", metadata={"run": "7"}
  )
  assert made.object == "batch" and made.status == "validating" and made.metadata == {"run": "7"}
  batch = wait(sdk, made.id)
  assert batch.status == "completed" and batch.error_file_id is None and batch.errors is None
  assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (30, 30, 0)
  assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
  assert batch.expires_at == batch.created_at + 24 * 3600
  answers = read(sdk, batch.output_file_id)
  assert [answer["custom_id"] for answer in answers] == [f"id-{prompt}" for prompt in prompts]
  for prompt, answer in zip(prompts, answers, strict=True):
    single = sdk.chat.completions.create(
      model="tiny", messages=[{"role": "user", "content": prompt}], max_tokens=4, seed=1
    )
    assert answer["response"]["status_code"] == 200 and answer["error"] is None and answer["response"]["request_id"]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == single.choices[0].message.content
    assert answer["response"]["body"]["usage"]["completion_tokens"] == single.usage.completion_tokens


def test_completions_are_served_too(sdk):
  lines = [make_line("a", {"prompt": [7, 8, 9], "max_tokens": 3}, "/v1/completions")]
  batch = wait(sdk, create(sdk, lines, "/v1/completions").id)
  [answer] = read(sdk, batch.output_file_id)
  assert answer["response"]["body"]["object"] == "text_completion"


def test_responses_are_served_too(sdk):
  url = "/v1/responses"
  bodies = {
    "good": {"input": "the cat", "max_output_tokens": 4, "seed": 1},
    "unstored": {"input": "the cat", "max_output_tokens": 4, "store": False},
    "stored": {"input": "the cat", "store": True},
    "later": {"input": "the cat", "previous_response_id": "resp_1"},
    "stream": {"input": "the cat", "stream": True},
  }
  batch = wait(sdk, create(sdk, [make_line(name, body, url) for name, body in bodies.items()], url).id)
  answers = {each["custom_id"]: each["response"]["body"] for each in read(sdk, batch.output_file_id)}
  single = sdk.responses.create(model="tiny", input="the cat", max_output_tokens=4, extra_body={"seed": 1})
  assert answers.keys() == {"good", "unstored"} and answers["good"]["object"] == "response"
  assert answers["good"]["output"][0]["content"][0]["text"] == single.output_text
  assert not answers["good"]["store"]
  errors = {each["custom_id"]: each["response"]["body"]["error"] for each in read(sdk, batch.error_file_id)}
  assert {name: error["param"] for name, error in errors.items()} == {
    "stored": "store",
    "later": "previous_response_id",
    "stream": "stream",
  }


def test_refused_lines_go_into_the_error_file(sdk):
  bodies = {
    "good": BODY,
    "hot": BODY | {"top_p": 9},
    "other": BODY | {"model": "gpt"},
    "stream": BODY | {"stream": True},
    "first": BODY | {"priority": -5},
    "none": {},
  }
  batch = wait(sdk, create(sdk, [make_line(name, body) for name, body in bodies.items()]).id)
  assert batch.status == "completed" and batch.request_counts.failed == 5 and batch.request_counts.completed == 1
  assert [answer["custom_id"] for answer in read(sdk, batch.output_file_id)] == ["good"]
  errors = {answer["custom_id"]: answer["response"] for answer in read(sdk, batch.error_file_id)}
  assert {name: error["status_code"] for name, error in errors.items()} == {
    "hot": 400,
    "other": 404,
    "stream": 400,
    "first": 400,
    "none": 400,
  }
  assert errors["hot"]["body"]["error"]["param"] == "top_p"
  assert errors["stream"]["body"]["error"]["param"] == "stream"


def test_a_bad_file_fails_with_an_error_a_line(sdk):
  lines = [
    make_line("good"),
    "{",
    make_line("good"),
    make_line("x", url="/v1/completions"),
    make_line("y", method="GET"),
    make_line(""),
    make_line("z", body=[1]),
    make_line("u", unknown=1),
    '{"custom_id": "w"}',
    '{"custom_id": "\\ud800", "method": "POST"}',
    "",
    make_line("last") + " x",
  ]
  batch = wait(sdk, create(sdk, lines).id)
  assert batch.status == "failed" and batch.output_file_id is None and batch.failed_at
  codes = {error.line: error.code for error in batch.errors.data}
  assert codes == {
    2: "invalid_json_line",
    3: "duplicate_custom_id",
    4: "mismatched_url",
    5: "invalid_method",
    6: "invalid_custom_id",
    7: "invalid_body",
    8: "invalid_request_line",
    9: "invalid_request_line",
    10: "invalid_json_line",
    12: "invalid_json_line",
  }
  assert [each["error"]["line"] for each in read(sdk, batch.error_file_id)] == sorted(codes)


@pytest.mark.parametrize("content", [[], ["", "  "]], ids=("nothing", "blank"))
def test_an_empty_file_fails(sdk, content):
  batch = wait(sdk, create(sdk, content).id)
  assert batch.status == "failed" and [error.code for error in batch.errors.data] == ["empty_file"]


def test_many_bad_lines_harm_nobody(both):
  """One line an error, nothing lost; others are served meanwhile."""
  served, sdk = both
  bad = create(sdk, ["{bad"] * 20_000)
  assert sdk.chat.completions.create(model="tiny", messages=BODY["messages"], max_tokens=3).choices
  good = wait(sdk, create(sdk, [make_line("a")]).id)
  assert good.status == "completed"
  batch = wait(sdk, bad.id)
  assert batch.status == "failed" and len(batch.errors.data) == 101
  assert batch.errors.data[-1].message.startswith("19900 more lines are bad")
  assert [each["error"]["line"] for each in read(sdk, batch.error_file_id)] == [*range(1, 20_001)]


def test_files(sdk):
  content = make_line("a") + "\n"
  made = sdk.files.create(file=("dir/näme.jsonl", content.encode()), purpose="batch")
  assert (made.object, made.bytes, made.filename, made.purpose) == ("file", len(content), "näme.jsonl", "batch")
  assert sdk.files.retrieve(made.id) == made and sdk.files.content(made.id).text == content
  second = upload(sdk, ["x"])
  assert [file.id for file in sdk.files.list(limit=1)][:2] == [second, made.id]  # two pages
  assert sdk.files.list(purpose="batch_output", limit=1, order="asc").data[0].purpose == "batch_output"
  assert sdk.files.delete(second).deleted
  for call in (sdk.files.retrieve, sdk.files.delete, sdk.files.content):
    with pytest.raises(openai.NotFoundError) as caught:
      call(second)
    assert caught.value.code == "file_not_found"


def test_batches_are_listed_in_pages(sdk):
  ids = [create(sdk, [make_line("a")]).id for _ in range(3)]
  page = sdk.batches.list(limit=2)
  assert [batch.id for batch in page.data] == [ids[2], ids[1]] and page.has_more
  assert sdk.batches.list(limit=2, after=ids[1]).data[0].id == ids[0]


@pytest.mark.parametrize(
  "change, status, param",
  [
    ({"endpoint": "/v1/images"}, 400, "endpoint"),
    ({"endpoint": None}, 400, "endpoint"),
    ({"completion_window": "1h"}, 400, "completion_window"),
    ({"input_file_id": "file-unknown"}, 404, None),
    ({"input_file_id": 7}, 400, "input_file_id"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"metadata": {"k" * 65: ""}}, 400, "metadata"),
    ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 400, "output_expires_after"),
  ],
  ids=str,
)
def test_bad_batches_are_refused(both, sdk, change, status, param):
  body = {"input_file_id": upload(sdk, ["x"]), "endpoint": CHAT, "completion_window": "24h"} | change
  answer = httpx.post(f"{url_of(both[0])}/v1/batches", json=body)
  assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text


@pytest.mark.parametrize(
  "sent, status, said",
  [
    ({"files": {"file": ("a", b"x")}}, 400, "purpose"),
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "assistants"}}, 400, "purpose=batch"),
    (
      {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "expires_after[seconds]": "9"}},
      400,
      "expires_after",
    ),
    ({"files": {"file": ("a", b"x")}, "data": {"purpose": "batch", "x": "9"}}, 400, "besides purpose and file"),
    ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, 400, "not named file"),
    ({"files": [("file", ("a", b"x"))] * 2, "data": {"purpose": "batch"}}, 400, "several files"),
    ({"files": {"purpose": (None, "batch")}}, 400, "has no file"),
    ({"json": {"purpose": "batch"}}, 415, "multipart/form-data"),
    ({"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 400, "multipart"),
    ({"content": b"", "headers": {"content-type": "multipart/form-data; boundary=a"}}, 400, "cut"),
    ({"data": {"p" * 9000: "x"}, "files": {"file": ("a", b"x")}}, 400, "not the multipart"),
    ({"data": {"purpose": "x" * 9000}, "files": {"file": ("a", b"x")}}, 413, "a field has more than"),
  ],
)
def test_bad_uploads_are_refused(both, sdk, sent, status, said):
  answer = httpx.post(f"{url_of(both[0])}/v1/files", **sent)
  assert answer.status_code == status and said in answer.json()["error"]["message"] + str(
    answer.json()["error"]["param"]
  ), answer.text


def sdk_folder(both) -> str:
  return both[0].host._options.batch_dir


UPLOAD = (
  b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
  b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}\n\r\n--b--\r\n'
)
UPLOAD_HEADERS = {"content-type": "multipart/form-data; boundary=b"}


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3), st.integers(0, 3)), max_size=4))
def test_any_change_of_an_upload_is_served_or_refused(both, changes):
  raw = bytearray(UPLOAD)
  for at, new, num_cut in changes:
    place = int(at * len(raw))
    raw[place : place + num_cut] = new
  answer = httpx.post(f"{url_of(both[0])}/v1/files", content=bytes(raw), headers=UPLOAD_HEADERS)
  assert answer.status_code in (200, 400, 413), answer.text
  if not changes:
    assert answer.json()["bytes"] == 3 and answer.json()["filename"] == "a.jsonl"


@pytest.mark.parametrize("size", [1, 7])
def test_an_upload_may_come_in_any_pieces(both, sdk, size):
  pieces = (UPLOAD[at : at + size] for at in range(0, len(UPLOAD), size))
  answer = httpx.post(f"{url_of(both[0])}/v1/files", content=pieces, headers=UPLOAD_HEADERS)
  assert sdk.files.content(answer.json()["id"]).text == "{}\n"


def test_a_client_that_leaves_in_an_upload_leaves_nothing(both, sdk):
  served = both[0]
  folder = pathlib.Path(sdk_folder(both)) / "files"
  before = {path.name for path in folder.iterdir()}
  head = "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9999\r\n"
  head += f"content-type: {UPLOAD_HEADERS['content-type']}\r\n\r\n"
  with socket.create_connection(("127.0.0.1", served.host.http_port)) as client:
    client.sendall(head.encode() + UPLOAD[:-9])
    served.wait_until(lambda: {path.name for path in folder.iterdir()} > before)
  served.wait_until(lambda: {path.name for path in folder.iterdir()} == before)


def test_a_start_removes_its_own_cut_files_alone(tokenizer, tmp_path):
  (tmp_path / "files").mkdir()
  (tmp_path / "files" / "thesis.txt").write_text("years of work")
  (tmp_path / "files" / f"file-{'0' * 24}").write_text("half an upl")
  with serving(tokenizer, tmp_path):
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["thesis.txt"]
    assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("batches.sqlite*")} == {0}


def test_uploads_leave_nothing_that_has_no_row(both, sdk):
  files = {path.name for path in (pathlib.Path(sdk_folder(both)) / "files").iterdir()}
  assert files == {file.id for file in sdk.files.list()}


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=101", "limit=-1", "who=me", "after=batch_x"])
def test_bad_pages_are_refused(both, query):
  answer = httpx.get(f"{url_of(both[0])}/v1/batches?{query}")
  assert answer.status_code == (404 if query.startswith("after") else 400), answer.text


def test_answers_are_as_the_document_says(both, sdk):
  bad, good = (wait(sdk, create(sdk, lines).id) for lines in (["{"], [make_line("a"), make_line("b", {})]))
  with httpx.Client(base_url=url_of(both[0]), timeout=60) as http:
    document = http.get("/openapi.json").json()

    def check(method: str, path: str, its_id: str = "", status: int = 200, **sent: Any) -> Any:
      answer = http.request(method, path.replace("{id}", its_id), **sent)
      assert answer.status_code == status, answer.text
      said = document["paths"][path][method]["responses"]["200" if status == 200 else "default"]["content"]
      schema = said["application/json"]["schema"] | {"components": document["components"]}
      jsonschema.Draft202012Validator(schema).validate(answer.json())
      return answer.json()

    file = check("post", "/v1/files", files={"file": ("a", b"x")}, data={"purpose": "batch"})
    for its_id in (file["id"], good.output_file_id, good.error_file_id, bad.error_file_id):
      check("get", "/v1/files/{id}", its_id)
    check("get", "/v1/files", params={"purpose": "batch_output", "limit": 2})
    check("get", "/v1/files/{id}", "file-unknown", 404)
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    schema = document["components"]["schemas"]["BatchRequest"]
    jsonschema.Draft202012Validator(schema).validate(body)
    assert schema["properties"]["endpoint"]["enum"] == [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"]
    wait(sdk, check("post", "/v1/batches", json=body)["id"])
    for its_id in (good.id, bad.id):
      check("get", "/v1/batches/{id}", its_id)
    check("post", "/v1/batches/{id}/cancel", good.id, 409)
    check("get", "/v1/batches", params={"limit": 3})
    check("delete", "/v1/files/{id}", file["id"])


def test_too_large_files_are_refused_before_they_are_stored(tokenizer, tmp_path):
  with serving(tokenizer, tmp_path, max_batch_file_bytes=300_000, max_batch_storage_mb=1) as (served, sdk):
    with pytest.raises(openai.APIStatusError) as caught:
      upload(sdk, ["x" * 700_000])
    assert caught.value.status_code == 413 and caught.value.code == "file_too_large"
    with pytest.raises(openai.APIStatusError) as caught:
      upload(sdk, ["x" * 300_001])  # the body's length alone does not say so
    assert caught.value.status_code == 413 and "--max_batch_file_bytes" in caught.value.message
    for _ in range(3):
      upload(sdk, ["x" * 300_000])
    with pytest.raises(openai.APIStatusError) as caught:
      upload(sdk, ["x" * 300_000])
    assert caught.value.status_code == 413 and caught.value.code == "storage_limit"
    assert len(list((tmp_path / "files").iterdir())) == 3
    sdk.files.delete(sdk.files.list(limit=1).data[0].id)
    upload(sdk, ["x"])


def test_tenants_see_their_own_alone(tokenizer, tmp_path):
  keys = {"rW5vJ8Jk2nq4uYt1sXzB8mE0": "a", "Qm3cT7uEw9pLz2aHk6dGf1Vx": "b"}
  (tmp_path / "keys").write_text("".join(f"{key} {tenant}\n" for key, tenant in keys.items()))
  (tmp_path / "keys").chmod(0o600)
  with serving(tokenizer, tmp_path / "batches", api_key_file=str(tmp_path / "keys")) as (served, sdk):
    mine, other = (sdk.with_options(api_key=key) for key in keys)
    batch = wait(mine, create(mine, [make_line("a")]).id)
    assert batch.status == "completed" and len(mine.batches.list().data) == 1
    assert not other.batches.list().data and not other.files.list().data
    for call, its_id in (
      (other.batches.retrieve, batch.id),
      (other.batches.cancel, batch.id),
      (other.files.retrieve, batch.output_file_id),
      (other.files.content, batch.output_file_id),
      (other.files.delete, batch.input_file_id),
      (
        lambda file: other.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
        batch.input_file_id,
      ),
    ):
      with pytest.raises(openai.NotFoundError):
        call(its_id)
    with pytest.raises(openai.AuthenticationError):
      sdk.batches.list()
    assert read(mine, batch.output_file_id)[0]["custom_id"] == "a"


def test_a_batch_can_be_cancelled(tokenizer, tmp_path):
  with serving(tokenizer, tmp_path) as (served, sdk):
    served.runner.go.clear()
    made = create(sdk, [make_line(str(number)) for number in range(300)])
    served.wait_until(lambda: len(served.generations) > 0)
    with pytest.raises(openai.ConflictError, match="is the input of"):
      sdk.files.delete(made.input_file_id)
    assert sdk.batches.cancel(made.id).status == "cancelling"
    served.runner.go.set()
    batch = wait(sdk, made.id)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    answers, errors = read(sdk, batch.output_file_id), read(sdk, batch.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    assert sorted(int(each["custom_id"]) for each in (*answers, *errors)) == [*range(300)]
    with pytest.raises(openai.ConflictError):
      sdk.batches.cancel(made.id)
    served.wait_until(lambda: served.engine.num_live == 0)
    assert sdk.files.delete(made.input_file_id).deleted


def test_an_old_batch_expires(tokenizer, tmp_path, monkeypatch):
  """With the results it has; the clock stands 24 hours later."""
  monkeypatch.setattr(batch_store, "WINDOW_S", 0)
  with serving(tokenizer, tmp_path) as (served, sdk):
    batch = wait(sdk, create(sdk, [make_line(str(number)) for number in range(200)]).id)
    assert batch.status == "expired" and batch.expired_at
    answers, errors = read(sdk, batch.output_file_id), read(sdk, batch.error_file_id)
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    assert sorted(int(each["custom_id"]) for each in (*answers, *errors)) == [*range(200)]


def test_a_drain_keeps_what_is_done_and_the_next_start_does_the_rest(tokenizer, tmp_path):
  with serving(tokenizer, tmp_path) as (served, sdk):
    served.runner.seconds = 0.01
    made = create(sdk, [make_line(str(number)) for number in range(300)])
    served.wait_until(lambda: sdk.batches.retrieve(made.id).request_counts.completed > 10)
  with serving(tokenizer, tmp_path) as (served, sdk):
    batch = wait(sdk, made.id)
    assert batch.status == "completed" and batch.request_counts.completed == 300
    assert [answer["custom_id"] for answer in read(sdk, batch.output_file_id)] == [*map(str, range(300))]


def test_interactive_requests_find_free_slots(tokenizer, tmp_path):
  config = tiny_config(max_num_seqs=8, token_budgets=(8, 64))
  with serving(tokenizer, tmp_path, config=config) as (served, sdk):
    served.runner.seconds = 0.002
    made = create(sdk, [make_line(str(number), BODY | {"ignore_eos": True}) for number in range(200)])
    most = 0

    def some_done() -> bool:
      nonlocal most
      most = max(most, len(served.generations))
      return sdk.batches.retrieve(made.id).request_counts.completed > 50

    served.wait_until(some_done)
    assert 1 < most <= 7
    assert sdk.chat.completions.create(model="tiny", messages=BODY["messages"], max_tokens=3).choices
    assert wait(sdk, made.id).status == "completed"


def test_lines_have_the_priority_of_batches_and_are_limited(tokenizer, tmp_path):
  with serving(tokenizer, tmp_path, max_batch_lines_at_once=3) as (served, sdk):
    served.runner.go.clear()
    made = create(sdk, [make_line(str(number)) for number in range(20)])
    served.wait_until(lambda: served.engine.num_live == 3)
    live = [*served.engine._scheduler._running, *served.engine._scheduler._waiting]
    assert {request.priority for request in live} <= {BATCH_PRIORITY} and len(served.generations) == 3
    served.runner.go.set()
    assert wait(sdk, made.id).status == "completed"


def test_interactive_requests_are_served_before_a_flood_of_lines(tokenizer, tmp_path):
  """By the order in which requests end; the device stands still until all have come."""
  config = tiny_config(max_num_seqs=4, token_budgets=(8, 64))
  with serving(tokenizer, tmp_path, config=config) as (served, sdk):
    served.runner.go.clear()
    made = create(sdk, [make_line(str(number), BODY | {"ignore_eos": True}) for number in range(200)])
    served.wait_until(lambda: served.engine.num_live == 3)
    stopping = pb.StopParams(max_tokens=2, ignore_eos=True)
    calls = [
      served.generation.GenerateUnary.future(
        pb.GenerateRequest(request_id=f"me-{number}", token_ids=pb.TokenIds(ids=[7]), stopping=stopping)
      )
      for number in range(5)
    ]
    served.wait_until(lambda: served.engine.num_live == 3 + 5)
    served.runner.go.set()
    for call in calls:
      call.result(timeout=60)
    assert wait(sdk, made.id).request_counts.completed == 200
    order = [record.id for record in served.engine.stats(1000).requests]
    # Behind the lines that ran, and the one that runs even if no slot is free.
    assert len(order) == 205 and max(order.index(f"me-{number}") for number in range(5)) <= 3 + 1 + 4


@pytest.mark.parametrize("other", ["frontend_processes=2", "http_port=-1"])
def test_one_process_with_http_owns_the_folder(tmp_path, other):
  with flagsaver.flagsaver(), pytest.raises(ConfigError, match=f"not possible with {other}"):
    flags.parse_flags(["server", f"--batch_dir={tmp_path}", f"--{other}"], "server.main")


def test_a_full_queue_delays_lines_and_fails_none(tokenizer, tmp_path):
  config = tiny_config(max_num_seqs=4, token_budgets=(8, 64), max_queued_requests=1)
  with serving(tokenizer, tmp_path, config=config, max_batch_lines_at_once=64) as (served, sdk):
    batch = wait(sdk, create(sdk, [make_line(str(number)) for number in range(20)]).id)
    assert batch.request_counts.completed == 20


def test_a_full_disk_pauses_batches_and_nothing_else(tokenizer, tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(batch_runner, "_DISK_RETRY_S", 0.05)
  with serving(tokenizer, tmp_path) as (served, sdk):
    store = served.host._batches._store

    def set_most_pages(number: int) -> None:
      work = store.run(lambda: store._db.execute(f"PRAGMA max_page_count={number}").fetchone())
      asyncio.run_coroutine_threadsafe(work, served.loop).result()

    served.runner.go.clear()
    made = create(sdk, [make_line(str(number)) for number in range(100)])
    served.wait_until(lambda: len(served.generations) > 0)
    set_most_pages(1)  # those that are in use, and no more
    served.runner.go.set()
    served.wait_until(lambda: "batches pause" in caplog.text)
    assert sdk.chat.completions.create(model="tiny", messages=BODY["messages"], max_tokens=3).choices
    with pytest.raises(openai.InternalServerError) as caught:
      for _ in range(500):
        upload(sdk, ["x"])
    assert caught.value.status_code == 507 and caught.value.code == "storage_unavailable"
    assert sdk.batches.retrieve(made.id).status == "in_progress"
    set_most_pages(1 << 30)
    batch = wait(sdk, made.id)
    assert [answer["custom_id"] for answer in read(sdk, batch.output_file_id)] == [*map(str, range(100))]
    assert {path.name for path in (tmp_path / "files").iterdir()} == {file.id for file in sdk.files.list()}


def test_they_are_off_without_a_folder(client):
  with pytest.raises(openai.NotFoundError, match="--batch_dir=FOLDER"):
    client.batches.list()
  with pytest.raises(openai.NotFoundError, match="--batch_dir=FOLDER"):
    client.files.list()


def test_a_folder_has_one_server(tokenizer, tmp_path):
  with (
    serving(tokenizer, tmp_path),
    pytest.raises(ConfigError, match="in use by another server"),
    serving(tokenizer, tmp_path),
  ):
    pass
  (tmp_path / "batches.sqlite").write_bytes(b"this is no database" * 300)
  with pytest.raises(ConfigError, match="cannot be used"), serving(tokenizer, tmp_path):
    pass
