"""Items and events of a response from pieces of an output, and the store: their limits and their bookkeeping."""

from hypothesis import given
from hypothesis import strategies as st
import msgspec
import pytest

from server.generation.response_store import MAX_RESPONSE_BYTES, ResponseStore, StoredResponse
from server.http.model_output.output_parser import CallPiece, ReasoningPiece, TextPiece
from server.http.responses.chat_translation import ToolName
from server.http.responses.response_output import ResponseOutput

PIECES = [
  *(ReasoningPiece(text) for text in ("the ", "cat ", "sits")),
  *(TextPiece(text) for text in ("a ", "dog")),
  CallPiece(0, "call_1", "n__look", "", is_last=False),
  *(CallPiece(0, None, None, part, is_last=False) for part in ('{"at"', ": 1")),
  CallPiece(0, None, None, "}", is_last=True),
  CallPiece(1, "call_2", "stop", "{}", is_last=True),
  TextPiece("end"),
]
TOOLS = {"n__look": ToolName("look", "n"), "stop": ToolName("stop")}


def build(groups, *, is_cut: bool = False) -> tuple[list[dict], list[dict]]:
  output = ResponseOutput(TOOLS)
  events = []
  for group in groups:
    events += [msgspec.json.decode(msgspec.json.encode(event)) for event in output.push_pieces(group, [])]
  events += [msgspec.json.decode(msgspec.json.encode(event)) for event in output.end_output(is_cut=is_cut)]
  return output.items, events


@given(st.lists(st.integers(0, len(PIECES)), max_size=5))
def test_items_do_not_depend_on_the_splitting(cuts):
  cuts = sorted({0, len(PIECES), *cuts})
  items, events = build(PIECES[low:high] for low, high in zip(cuts, cuts[1:], strict=False))
  assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call", "message"]
  assert items[0]["content"] == [{"type": "reasoning_text", "text": "the cat sits"}] and items[0]["summary"] == []
  assert items[1]["content"][0]["text"] == "a dog" and items[4]["content"][0]["text"] == "end"
  assert items[2]["arguments"] == '{"at": 1}' and (items[2]["name"], items[2]["namespace"]) == ("look", "n")
  assert items[3]["arguments"] == "{}" and "namespace" not in items[3]
  assert all(item["status"] == "completed" for item in items)
  assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
  reasoning = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
  assert "".join(reasoning) == "the cat sits"
  assert [event["text"] for event in events if event["type"] == "response.reasoning_text.done"] == ["the cat sits"]


def test_a_cut_output_and_an_empty_one():
  items, _ = build([PIECES[:7]], is_cut=True)
  assert [item["status"] for item in items] == ["completed", "completed", "incomplete"]
  items, events = build([])
  assert [item["type"] for item in items] == ["message"] and items[0]["content"][0]["text"] == ""
  assert [event["type"].rpartition(".")[2] for event in events] == ["added", "added", "done", "done", "done"]


def response(number: int, size: int = 0) -> dict:
  return {"id": f"resp_{number}", "output": [{"id": f"msg_{number}", "text": "a" * size}]}


def test_the_oldest_leave_first():
  store = ResponseStore(2)
  for number in range(3):
    store.put_response("ann", StoredResponse.of_response(response(number), [{"id": "msg_x"}]))
  assert len(store) == 2
  assert store.find_response("ann", "resp_0") is None and not store.find_items("ann", ["msg_0"])
  items = store.find_items("ann", ["msg_1", "msg_0", "msg_2"])
  assert {name: msgspec.json.decode(item) for name, item in items.items()} == {
    "msg_1": {"id": "msg_1", "text": ""},
    "msg_2": {"id": "msg_2", "text": ""},
  }
  found = store.find_response("ann", "resp_2")
  assert found is not None and found.read_response() == response(2) and found.read_context() == [{"id": "msg_x"}]
  assert store.find_response("bob", "resp_2") is None and not store.find_items("bob", ["msg_2"])
  assert not store.remove_response("bob", "resp_2") and store.remove_response("ann", "resp_2")
  assert not store.remove_response("ann", "resp_2") and not store.find_items("ann", ["msg_2"])


@pytest.mark.parametrize("size", [10, 400, 2000])
def test_bytes_are_limited(size):
  store = ResponseStore(1000, max_bytes=1000)
  for number in range(50):
    store.put_response("", StoredResponse.of_response(response(number, size), []))
    stored = [store.find_response("", f"resp_{each}") for each in range(number + 1)]
    assert sum(each.num_bytes for each in stored if each is not None) <= 1000
  assert (len(store) == 0) == (size == 2000)


def test_a_store_of_none():
  store = ResponseStore(0)
  store.put_response("", StoredResponse.of_response(response(1), []))
  assert len(store) == 0


def test_what_is_too_large_for_a_message_between_processes():
  store = ResponseStore(10)
  store.put_response("", StoredResponse.of_response(response(1, MAX_RESPONSE_BYTES), []))
  assert len(store) == 0
  for number in (2, 3):
    store.put_response("", StoredResponse.of_response(response(number, MAX_RESPONSE_BYTES * 2 // 3), []))
  assert len(store) == 2 and len(store.find_items("", ["msg_2", "msg_3"])) == 1
