"""Errors name fields as their callers do: sluice.v1's own over gRPC, OpenAI's over HTTP."""

from google.rpc import error_details_pb2, status_pb2
import pytest

from engine.errors import InvalidRequest
from server.errors import NoTokenizer
from server.http.error_responses import make_error_answer
from server.rpc.grpc_status import make_status_answer


@pytest.mark.parametrize(
  ("field", "names", "param"),
  [
    ("top_p", {}, "top_p"),
    ("chat.messages[2].role", {}, "messages[2].role"),
    ("constraint.json_schema", {}, "json_schema"),
    ("constraint.json_schema", {"constraint.json_schema": "tools"}, "tools"),
    ("max_tokens", {"max_tokens": "max_completion_tokens"}, "max_completion_tokens"),
    ("min_tokens", {"max_tokens": "max_completion_tokens"}, "min_tokens"),
  ],
)
def test_a_field_goes_by_the_callers_name(field, names, param):
  # The rest of the text is never looked at, whatever it says.
  error = InvalidRequest("=chat.max_tokens=2 is not allowed: send 1", field=field)
  said = make_error_answer(error, names).body["error"]
  assert (said["message"], said["param"]) == (f"{param}=chat.max_tokens=2 is not allowed: send 1", param)
  answer = make_status_answer(error)
  assert answer.message == f"{field}=chat.max_tokens=2 is not allowed: send 1"
  status = status_pb2.Status.FromString(dict(answer.metadata)["grpc-status-details-bin"])
  bad = error_details_pb2.BadRequest()
  assert status.details[1].Unpack(bad) and bad.field_violations[0].field == field


def test_errors_name_their_field_alone():
  said = make_error_answer(InvalidRequest("output.text is what the message begins with")).body["error"]
  assert (said["message"], said["param"]) == ("output.text is what the message begins with", None)
  said = make_error_answer(NoTokenizer("needs a tokenizer", field="stopping.stop")).body["error"]
  assert (said["message"], said["param"]) == ("stop needs a tokenizer", "stop")
