"""Says for each path how the router sends its requests. Sends nothing.

Some requests need one replica: what they name is in its memory or in its folder.
"""

import dataclasses
import enum
import re


class Destination(enum.Enum):
  """Where a request goes."""

  ANY = "any"  # the policy chooses
  RESPONSE_HOME = "response_home"  # the replica that stores a response
  BATCH_REPLICA = "batch_replica"  # the one with the batches' folder
  EVERY = "every"  # all replicas
  NONE = "none"  # the router answers itself


@dataclasses.dataclass(frozen=True)
class PathRule:
  """How requests of a path are sent.

  Attributes:
    destination: where they go.
    has_prompt: the body has a prompt that a replica computes, by which the policy may choose.
    may_continue: the body may name a stored response that it continues.
    may_repeat: the request may begin again elsewhere after a replica has seen it, since it leaves nothing behind.
    is_upload: the body is streamed, and may be larger than others.
    response_id: the stored response that the path names; "" if there is none.
  """

  destination: Destination = Destination.ANY
  has_prompt: bool = False
  may_continue: bool = False
  may_repeat: bool = True
  is_upload: bool = False
  response_id: str = ""


_PROMPT = PathRule(has_prompt=True)
_RESPONSE_PATH = re.compile(r"/v1/responses/([^/]+)(/input_items|/cancel)?")
_BATCH_PATH = re.compile(r"/v1/(files|batches)(/.*)?")
_RULES = {
  "/v1/completions": _PROMPT,
  "/v1/chat/completions": _PROMPT,
  "/v1/messages": _PROMPT,
  "/v1/messages/count_tokens": PathRule(),
  # Sent again, it could leave two stored responses.
  "/v1/responses": PathRule(has_prompt=True, may_continue=True, may_repeat=False),
  "/v1/responses/input_tokens": PathRule(may_continue=True),
  "/v1/load_lora_adapter": PathRule(Destination.EVERY, may_repeat=False),
  "/v1/unload_lora_adapter": PathRule(Destination.EVERY, may_repeat=False),
  # These show one server: the page's feed would change replicas with each connection.
  "/metrics": PathRule(Destination.NONE),
  "/": PathRule(Destination.NONE),
  "/live": PathRule(Destination.NONE),
  "/page.css": PathRule(Destination.NONE),
  "/page.js": PathRule(Destination.NONE),
}


def find_path_rule(method: str, path: str) -> PathRule:
  """Returns the rule of a request.

  Args:
    method: the HTTP method.
    path: the decoded path, without a slash at its end.
  """
  rule = _RULES.get(path)
  if rule is not None:
    return rule
  if match := _RESPONSE_PATH.fullmatch(path):
    return PathRule(Destination.RESPONSE_HOME, may_repeat=method == "GET", response_id=match[1])
  if _BATCH_PATH.fullmatch(path):
    is_upload = method == "POST" and path == "/v1/files"
    return PathRule(Destination.BATCH_REPLICA, may_repeat=False, is_upload=is_upload)
  return PathRule()
