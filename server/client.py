"""A Python client of sluice.v1: plain values in and out, errors as exceptions with a reason. Imports no engine.

from server.client import Client

with Client("127.0.0.1:50051") as client:
  client.wait_ready()
  print(client.generate("Once upon a time", max_tokens=40).text)
  with client.stream([{"role": "user", "content": "Hello"}], temperature=0.7) as stream:
    for piece in stream:
      print(piece.text, end="", flush=True)
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import time
from typing import Any, Self, TypedDict, Unpack, cast

from google.protobuf.message import Message
from google.rpc import error_details_pb2
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from server.proto import sluice_pb2 as pb
from server.proto import sluice_pb2_grpc as pb_grpc

type Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Raw text, token ids, or chat messages with "role" and "content"."""

_FINISH_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class SluiceError(Exception):
  """An RPC that failed.

  Attributes:
    code: the gRPC status code.
    reason: a stable word, for example "INVALID_REQUEST", "OVERLOADED" or "DRAINING"; "" if the server sent none.
    retry_after_s: seconds until a retry; None if the server sent no value.
    request_id: the call's id in the server's access log; "" if no server answered.
  """

  def __init__(
    self,
    message: str,
    code: grpc.StatusCode,
    reason: str = "",
    retry_after_s: float | None = None,
    request_id: str = "",
  ):
    super().__init__(message)
    self.code = code
    self.reason = reason
    self.retry_after_s = retry_after_s
    self.request_id = request_id


class Options(TypedDict, total=False):
  """Keyword arguments of a generation; omitted ones take the server's default. sluice.proto describes each."""

  model: str
  request_id: str
  priority: int
  cache_salt: str
  speculation: str
  tenant: str
  queue_timeout_s: float
  timeout_s: float
  temperature: float
  top_p: float
  top_k: int
  min_p: float
  frequency_penalty: float
  presence_penalty: float
  repetition_penalty: float
  seed: int
  n: int
  logit_bias: Mapping[int, float]
  allowed_token_ids: Sequence[int]
  json_schema: str
  json_object: bool
  regex: str
  choice: Sequence[str]
  grammar: str
  max_tokens: int
  min_tokens: int
  stop: Sequence[str]
  stop_token_ids: Sequence[int]
  ignore_eos: bool
  logprobs: int
  prompt_logprobs: int
  return_text: bool
  return_token_ids: bool
  skip_special_tokens: bool


@dataclasses.dataclass(frozen=True)
class Ending:
  """The finish of one output.

  Attributes:
    reason: "stop" or "length".
    matched: the stop string, or the stop token's id, or None.
    prompt_tokens, completion_tokens, cached_tokens: usage.
    time_to_first_token_s, total_s: seconds, measured by the server.
  """

  reason: str
  matched: str | int | None
  prompt_tokens: int
  completion_tokens: int
  cached_tokens: int
  time_to_first_token_s: float
  total_s: float


@dataclasses.dataclass(frozen=True)
class Piece:
  """The new part of one output. Its last piece sets `ending`."""

  index: int
  text: str
  token_ids: tuple[int, ...]
  logprobs: tuple[pb.TokenLogprobs, ...] = ()
  prompt_logprobs: tuple[pb.TokenLogprobs, ...] = ()
  ending: Ending | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """One complete output."""

  text: str
  token_ids: tuple[int, ...]
  logprobs: tuple[pb.TokenLogprobs, ...]
  ending: Ending


class Stream:
  """Iterates over pieces as the server sends them. `cancel`, or leaving the `with` block, aborts the request."""

  def __init__(self, call):
    self._call = call
    self.request_id = ""

  def __iter__(self) -> Iterator[Piece]:
    with _errors():
      for message in self._call:
        if message.HasField("started"):
          self.request_id = message.started.request_id
        yield from read_pieces(message)

  def cancel(self) -> None:
    """Aborts the request; iteration then raises SluiceError with code CANCELLED."""
    self._call.cancel()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._call.cancel()


class Client:
  """A connection to one server. Threads may share it."""

  def __init__(
    self,
    target: str,
    *,
    max_message_bytes: int = 64 << 20,
    api_key: str | None = None,
    tls: bool = False,
    tls_ca_file: str = "",
    tls_cert_file: str = "",
    tls_key_file: str = "",
  ):
    """Creates the client, which connects on first use.

    Args:
      target: HOST:PORT.
      max_message_bytes: largest response message (log probabilities of a long prompt are large).
      api_key: sent with every call; None takes SLUICE_API_KEY from the environment, if set.
      tls: encrypt, and verify the server against the authorities that gRPC ships; any of the files below implies it.
      tls_ca_file: PEM authorities to verify the server against instead.
      tls_cert_file, tls_key_file: PEM certificate and key, for a server that requires a client certificate.

    Raises:
      OSError: a file cannot be read.
    """
    # The second option is for a server in this process; see ConnectionWatch.
    options = (("grpc.max_receive_message_length", max_message_bytes), ("grpc.enable_channelz", 0))
    api_key = os.environ.get("SLUICE_API_KEY") if api_key is None else api_key
    self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    if tls or tls_ca_file or tls_cert_file or tls_key_file:
      credentials = grpc.ssl_channel_credentials(_bytes(tls_ca_file), _bytes(tls_key_file), _bytes(tls_cert_file))
      self._channel = grpc.secure_channel(target, credentials, options)
    else:
      self._channel = grpc.insecure_channel(target, options)
    self._generation = pb_grpc.GenerationServiceStub(self._channel)
    self._model = pb_grpc.ModelServiceStub(self._channel)
    self._health: Any = health_pb2_grpc.HealthStub(self._channel)

  def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
    """Returns one complete output. For n > 1 use `generate_all`.

    Raises:
      SluiceError: the RPC failed.
    """
    return self.generate_all(prompt, **options)[0]

  def generate_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
    """Returns all n outputs, in order. Raises SluiceError."""
    with _errors():
      response = self._generation.GenerateUnary(
        make_generate_request(prompt, options), timeout=options.get("timeout_s"), metadata=self._metadata
      )
    return [
      Completion(each.text, tuple(each.token_ids), tuple(each.logprobs), read_ending(each.finished))
      for each in response.completions
    ]

  def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """Returns a stream of the outputs' pieces. Iteration raises the errors."""
    return Stream(
      self._generation.Generate(
        make_generate_request(prompt, options), timeout=options.get("timeout_s"), metadata=self._metadata
      )
    )

  def tokenize(self, text: str) -> list[int]:
    """Returns the token ids of a text, with the tokenizer's own tokens, for example BOS."""
    with _errors():
      return list(self._generation.Tokenize(pb.TokenizeRequest(text=text), metadata=self._metadata).token_ids)

  def detokenize(self, token_ids: Sequence[int]) -> str:
    """Returns the text of token ids, without special tokens."""
    with _errors():
      return self._generation.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), metadata=self._metadata).text

  def embed(
    self,
    inputs: Sequence[str | Sequence[int]],
    *,
    model: str = "",
    dimensions: int | None = None,
    normalize: bool = True,
    priority: int = 0,
    timeout_s: float | None = None,
  ) -> list[list[float]]:
    """Returns the embedding of each text or list of token ids, from a server with --enable_embeddings.

    Args:
      inputs: at most 2,048.
      model: the served model, or one of its adapters; "": the served model.
      dimensions: keep the first numbers; None: all.
      normalize: scale each to length 1.
      priority: lower first.
      timeout_s: seconds for all of them.

    Raises:
      SluiceError: the RPC failed.
    """
    given = [
      pb.EmbedInput(text=each) if isinstance(each, str) else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
      for each in inputs
    ]
    request = pb.EmbedRequest(model=model, inputs=given, dimensions=dimensions, normalize=normalize, priority=priority)
    with _errors():
      response = self._generation.Embed(request, timeout=timeout_s, metadata=self._metadata)
    return [list(each.values) for each in response.embeddings]

  def classify(
    self,
    inputs: Sequence[str | tuple[str, str] | Sequence[int]],
    *,
    model: str = "",
    use_activation: bool = True,
    priority: int = 0,
    timeout_s: float | None = None,
  ) -> list[dict[str, float]]:
    """Returns the probability of each class, by its name, for each input, from a model with a head of classes.

    Args:
      inputs: texts, pairs of texts for a reranker, or lists of token ids; at most 2,048.
      model: the served model, or one of its adapters; "": the served model.
      use_activation: False: the head's numbers as they are.
      priority: lower first.
      timeout_s: seconds for all of them.

    Raises:
      SluiceError: the RPC failed.
    """

    def make_input(given: str | tuple[str, str] | Sequence[int]) -> pb.ClassifyInput:
      match given:
        case str():
          return pb.ClassifyInput(text=given)
        case (str() as first, str() as second):
          return pb.ClassifyInput(pair=pb.TextPair(first=first, second=second))
      return pb.ClassifyInput(token_ids=pb.TokenIds(ids=given))  # pyright: ignore[reportArgumentType]

    request = pb.ClassifyRequest(
      model=model, inputs=map(make_input, inputs), use_activation=use_activation, priority=priority
    )
    with _errors():
      response = self._generation.Classify(request, timeout=timeout_s, metadata=self._metadata)
    return [dict(zip(response.labels, each.probabilities, strict=True)) for each in response.classifications]

  def abort(self, *request_ids: str) -> list[bool]:
    """Aborts live requests; returns for each id whether it was live."""
    with _errors():
      outcomes = self._generation.Abort(pb.AbortRequest(request_ids=request_ids), metadata=self._metadata).outcomes
    return [outcome == pb.AbortResponse.OUTCOME_ABORTED for outcome in outcomes]

  def model_info(self) -> pb.GetModelInfoResponse:
    """Returns the served model and its limits."""
    with _errors():
      return self._model.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)

  def load(self, steps_after_s: float | None = None) -> pb.GetLoadResponse:
    """Returns the server's load; with a time on the engine's clock, also later steps and finished requests."""
    with _errors():
      return self._model.GetLoad(pb.GetLoadRequest(steps_after_s=steps_after_s), metadata=self._metadata)

  def wait_ready(self, timeout_s: float = 60.0) -> None:
    """Waits until the server reports SERVING. Raises SluiceError with code DEADLINE_EXCEEDED after the timeout."""
    deadline = time.monotonic() + timeout_s
    request = health_pb2.HealthCheckRequest(service="sluice.v1.GenerationService")
    while (remaining := deadline - time.monotonic()) > 0:
      try:
        answer = self._health.Check(request, timeout=remaining, wait_for_ready=True)
      except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:  # pyright: ignore[reportAttributeAccessIssue]
          break
      else:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
          return
      time.sleep(min(0.1, max(0.0, remaining)))
    raise SluiceError(
      f"the server was not ready within {timeout_s:g} s; see its log, or allow more time",
      grpc.StatusCode.DEADLINE_EXCEEDED,
      "NOT_READY",
    )

  def close(self) -> None:
    """Closes the connection, and ends every RPC on it."""
    self._channel.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()


def read_pieces(message: pb.GenerateResponse) -> Iterator[Piece]:
  """Yields the pieces in one message of a stream, output by output."""
  endings = {finished.index: finished for finished in message.finished}
  for delta in message.deltas:
    ending = endings.pop(delta.index, None)
    yield Piece(
      delta.index,
      delta.text,
      tuple(delta.token_ids),
      tuple(delta.logprobs),
      tuple(delta.prompt_logprobs),
      read_ending(ending) if ending else None,
    )
  for index, ending in endings.items():
    yield Piece(index, "", (), ending=read_ending(ending))


def make_generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
  """Returns a request's protobuf message.

  Raises:
    TypeError, ValueError: an option is misspelled or has the wrong type, or there are two constraints.
  """
  unknown = options.keys() - Options.__annotations__.keys()
  if unknown:
    raise TypeError(f"unknown options {sorted(unknown)}; known are {sorted(Options.__annotations__)}")

  values: dict[str, Any] = dict(options)
  if "allowed_token_ids" in options:
    values["allowed_token_ids"] = pb.TokenIds(ids=options["allowed_token_ids"])
  if "choice" in options:
    values["choice"] = pb.Choices(values=options["choice"])

  def chosen(kind: type[Message]) -> dict[str, Any]:
    return {name: values[name] for name in kind.DESCRIPTOR.fields_by_name if name in values}

  constraint = chosen(pb.OutputConstraint)
  if len(constraint) > 1:
    raise TypeError(f"{' and '.join(constraint)} exclude each other; send one of them")
  request = pb.GenerateRequest(
    sampling=pb.SamplingParams(**chosen(pb.SamplingParams)),
    stopping=pb.StopParams(**chosen(pb.StopParams)),
    output=pb.OutputParams(**chosen(pb.OutputParams)),
    constraint=pb.OutputConstraint(**constraint) if constraint else None,
    **chosen(pb.GenerateRequest),
  )
  if "queue_timeout_s" in options:
    request.queue_timeout.FromNanoseconds(round(1e9 * options["queue_timeout_s"]))
  if isinstance(prompt, str):
    request.text = prompt
  elif all(issubclass(kind, int) for kind in set(map(type, prompt))):
    request.token_ids.SetInParent()
    request.token_ids.ids.extend(cast(Sequence[int], prompt))
  else:
    request.chat.messages.extend(
      pb.ChatMessage(role=item["role"], content=item["content"]) for item in prompt if isinstance(item, Mapping)
    )
  return request


def read_ending(finished: pb.Finished) -> Ending:
  """Returns an output's finish as plain values."""
  kind = finished.WhichOneof("matched")
  return Ending(
    reason=_FINISH_REASONS.get(finished.reason, "unspecified"),
    matched=getattr(finished, kind) if kind else None,
    prompt_tokens=finished.usage.prompt_tokens,
    completion_tokens=finished.usage.completion_tokens,
    cached_tokens=finished.usage.cached_tokens,
    time_to_first_token_s=finished.timing.time_to_first_token_s,
    total_s=finished.timing.total_s,
  )


@contextlib.contextmanager
def _errors() -> Iterator[None]:
  """Turns gRPC's errors into SluiceError."""
  try:
    yield
  except grpc.RpcError as error:
    raise _error_of(error) from error


def _bytes(path: str) -> bytes | None:
  return pathlib.Path(path).read_bytes() if path else None


def _error_of(call: grpc.RpcError) -> SluiceError:
  if not isinstance(call, grpc.Call):
    return SluiceError(str(call), grpc.StatusCode.UNKNOWN)
  reason, retry_after_s = "", None
  try:
    status = rpc_status.from_call(call)
  except ValueError:  # gRPC replaced the server's value with its own text, as when a deadline passes meanwhile
    status = None
  for detail in status.details if status else ():
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    if detail.Unpack(info):
      reason = info.reason
    elif detail.Unpack(retry):
      retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
  trailing: Any = call.trailing_metadata() or ()
  request_id = next((value for name, value in trailing if name == "x-request-id"), "")
  return SluiceError(call.details() or call.code().name, call.code(), reason, retry_after_s, request_id)
