"""Runs an engine in this process behind plain calls: texts or token ids in, outputs in order out. Starts no server.

  from sluice import LLM, SamplingParams

  with LLM("demo") as llm:
    for output in llm.generate(["2 + 3 =", "12 + 30 ="], SamplingParams(max_tokens=8, temperature=0)):
      print(output.text)

Parameters, validation and defaults are the server's: requests become the same sluice.v1 messages and pass through the
same validation, tokenizer, detokenizer and constraint compiler.
"""

from collections.abc import Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import gc
import logging
import numbers
import os
import pathlib
import queue
import threading
from typing import Any, Self, cast
import weakref

from engine.adapters import AdapterState
from engine.device.options import BuildOptions
from engine.engine import Engine
from engine.errors import AdapterNotLoaded, ConfigError, EngineError, InvalidRequest, Unavailable
from engine.request import Request
from engine.validation import check_generates, validate_request
from extensions.disaggregated.build import build_any
from extensions.python_api.engine_thread import EngineThread, Job, Pieces, describe_place
from extensions.python_api.llm_settings import split_settings
from extensions.python_api.outputs import RequestOutput, Score, read_score
from extensions.python_api.progress_bar import advance_bar, show_parts, show_progress
from extensions.python_api.sampling_params import SamplingParams
from server.client import Options, Piece, Prompt, make_generate_request
from server.errors import NoTokenizer
from server.generation.adapter_loader import check_adapter_name
from server.generation.prompt_classification import check_classifies, make_probabilities
from server.generation.prompt_embedding import (
  Vector,
  check_dimensions,
  check_embeds,
  make_embedding_call,
  read_vector,
  shorten_vector,
  tokenize_inputs,
)
from server.generation.request_validation import GenerationCall, make_generation_call, prompt_token_ids
from server.generation.sampling_defaults import SamplingDefaults, read_sampling_defaults
from server.model_settings import ModelSettings
from server.proto import sluice_pb2 as pb
from server.text.constraint_compiler import ConstraintCompiler
from server.text.tokenizer import Tokenizer, load_tokenizer

type TextOrIds = str | Sequence[int]
type Messages = Sequence[Mapping[str, str]]
type Sampling = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one for each."""
type Adapters = str | Sequence[str | None] | None
"""The name of a LoRA adapter for all prompts, or one for each; None: the model alone."""

DEMO_MODEL = pathlib.Path(__file__).resolve().parents[2] / "models" / "demo"
_LOOK_S = 0.1  # between two updates of a call's progress
# The engine returns prompt log probabilities only with a generated token; the most likely token decides is_greedy.
_SCORING: dict[str, Any] = {
  "max_tokens": 1,
  "temperature": 0.0,
  "ignore_eos": True,
  "prompt_logprobs": 1,
  "return_text": False,
}

_log = logging.getLogger("sluice")


class LLM:
  """A loaded model. Threads may share it; `close`, or the end of a `with` block, frees everything.

  Attributes:
    model_name: the checkpoint's name for the model.
    config: the engine's settings, including those that the build determined.
    tokenizer: the model's tokenizer; None if it has none, and prompts are token ids.
    defaults: the values of the model's generation_config.json, for fields that SamplingParams leaves out.
  """

  def __init__(self, model: str = "demo", *, progress: bool | None = None, **settings: Any):
    """Loads a model and compiles its executables.

    Args:
      model: a model folder, a name that `sluice serve` accepts, or "demo" for Sluice's demo model.
      progress: whether to show progress bars; None: on a terminal and in a notebook.
      settings: the engine's settings by flag name (docs/reference/flags.md), such as max_num_seqs=64, and those of
        TextSettings. Queues are unbounded by default.

    Raises:
      ConfigError: a setting is unknown or invalid.
      CheckpointError: Sluice cannot serve the model.
    """
    text, values = split_settings(settings)
    folder = _find_model_folder(str(model), text, progress)
    # Before the weights, which take minutes: a broken file fails at once.
    self.tokenizer = load_tokenizer(folder, max_prompt_bytes=text.max_prompt_bytes, chat_template=text.chat_template)
    if self.tokenizer is not None and self.tokenizer.chat_template_error:
      _log.warning("chats are refused: %s", " ".join(self.tokenizer.chat_template_error.split()))
    self.defaults: SamplingDefaults = {} if text.generation_config == "none" else read_sampling_defaults(folder)
    num_token_ids = self.tokenizer.num_token_ids if self.tokenizer is not None else 0
    options = BuildOptions(str(folder), num_token_ids=num_token_ids, **values)

    source = None
    if text.executable_bundle:
      from extensions.executable_bundle.bundle import Bundle

      source = Bundle(text.executable_bundle, options.batching)
    self._thread = EngineThread()
    with show_parts(progress) as advance:
      built = build_any(options, advance, self._thread.take_events, source=source)
    for warning in (*built.warnings, *built.fallbacks):
      _log.warning("%s", warning)
    for note in (built.lowered, built.ladder.reason, built.deterministic):
      if note:
        _log.info("%s", note)
    self.model_name, self.config = built.model_name, built.config
    self._read_adapter = built.read_adapter
    self._reading = threading.Lock()  # one adapter at a time, so that threads cannot fill the memory with weights
    self._thread.start(built.engine, self.tokenizer)
    self._finalizer = weakref.finalize(self, self._thread.close)
    self._compiler: ConstraintCompiler | None = None
    if self.tokenizer is not None:
      self._compiler = ConstraintCompiler(
        self.tokenizer,
        self.config.vocab_size,
        self.config.eos_token_ids,
        closes_objects=not text.json_schema_additional_properties,
      )

  def generate(
    self,
    prompts: TextOrIds | Sequence[TextOrIds],
    sampling_params: Sampling = None,
    *,
    adapter: Adapters = None,
    progress: bool | None = None,
  ) -> list[RequestOutput]:
    """Generates for one prompt or many; the engine batches them.

    Args:
      prompts: texts or lists of token ids, or a single one.
      sampling_params: one for all prompts, or one for each; None: the model's defaults.
      adapter: name of a loaded LoRA adapter for all prompts, or one for each; None: the model alone.
      progress: whether to show a bar on standard error after the first second; None: on a terminal and in a notebook.

    Returns:
      One output for each prompt, in order.

    Raises:
      InvalidRequest: a prompt or a field is invalid, or the model has no head of tokens. No prompt runs.
      AdapterNotLoaded: an adapter is not loaded. No prompt runs.
      GenerationFailed: a request failed, which ends all others. Ctrl-C ends them as well.
      Unavailable: this LLM is closed.
    """
    return self._run_prompts("generate", _list_prompts(prompts), sampling_params, adapter, progress)

  def chat(
    self,
    messages: Messages | Sequence[Messages],
    sampling_params: Sampling = None,
    *,
    adapter: Adapters = None,
    progress: bool | None = None,
  ) -> list[RequestOutput]:
    """Generates like `generate` for one conversation or many, each a list of messages with "role" and "content"."""
    return self._run_prompts("chat", _list_chats(messages), sampling_params, adapter, progress)

  def stream(
    self,
    prompt: TextOrIds | Messages,
    sampling_params: SamplingParams | None = None,
    *,
    adapter: str | None = None,
  ) -> Iterator[Piece]:
    """Generates for one prompt (a text, token ids or chat messages) and yields its output piece by piece.

    The request starts when the caller takes the first piece. It ends when the iterator is closed or garbage-collected.

    Raises:
      InvalidRequest, AdapterNotLoaded, GenerationFailed, Unavailable: see `generate`. The first two come at once.
    """
    self._check_open()
    is_chat = not isinstance(prompt, str) and any(isinstance(item, Mapping) for item in prompt)
    (checked,) = _list_chats(prompt) if is_chat else _list_prompts(prompt)  # pyright: ignore[reportArgumentType]
    (options,) = _list_options(sampling_params, 1)
    (name,) = self._list_adapters(adapter, 1)
    call = self._make_call(checked, options, name)
    constraint = call.constraints[0] if call.constraints else None
    validate_request(self.config, Request("", call.prompt_token_ids, call.params[0], constraint=constraint))
    return _iterate_pieces(self._thread, call)

  def score(
    self,
    prompts: TextOrIds | Sequence[TextOrIds],
    continuations: TextOrIds | Sequence[TextOrIds] | None = None,
    *,
    adapter: Adapters = None,
    progress: bool | None = None,
  ) -> list[Score]:
    """Returns the log probabilities of given tokens; the result holds no sampled token.

    Args:
      prompts: texts or lists of token ids, or a single one.
      continuations: the scored text or token ids after each prompt. Prompt and continuation texts are tokenized
        together, and the tokens after the prompt's are scored. None: the prompts' own tokens are scored, from the
        second on.
      adapter, progress: see `generate`.

    Raises:
      InvalidRequest: see `generate`; or a continuation has no token of its own.
    """
    listed = _list_prompts(prompts)
    firsts = [1] * len(listed)
    if continuations is not None:
      following = _list_prompts(continuations, "continuations")
      if len(following) != len(listed):
        raise InvalidRequest(
          f"has {len(following)} entries for {len(listed)} prompts; send one for each", field="continuations"
        )
      pairs = [self._join_pair(*pair, place) for place, pair in enumerate(zip(listed, following, strict=True))]
      listed, firsts = [ids for ids, _ in pairs], [first for _, first in pairs]
    outputs = self._run_prompts("score", listed, _SCORING, adapter, progress)
    return [read_score(output, first) for output, first in zip(outputs, firsts, strict=True)]

  def embed(
    self,
    inputs: TextOrIds | Sequence[TextOrIds],
    *,
    dimensions: int | None = None,
    normalize: bool = True,
    adapter: Adapters = None,
    progress: bool | None = None,
  ) -> list[list[float]]:
    """Returns the embedding of each text or list of token ids; the model needs enable_embeddings=True, or has no head.

    Args:
      inputs: texts or lists of token ids, or a single one.
      dimensions: keep the first numbers; None: all.
      normalize: scale each to length 1.
      adapter, progress: see `generate`.

    Raises:
      InvalidRequest, AdapterNotLoaded, GenerationFailed, Unavailable: see `generate`.
    """
    check_embeds(self.config)
    check_dimensions(dimensions, self.config)
    vectors = self._run_inputs("embed", _list_prompts(inputs, "inputs"), adapter, progress)
    return [shorten_vector(vector, dimensions, normalize).tolist() for vector in vectors]

  def classify(
    self,
    inputs: TextOrIds | tuple[str, str] | Sequence[TextOrIds | tuple[str, str]],
    *,
    use_activation: bool = True,
    adapter: Adapters = None,
    progress: bool | None = None,
  ) -> list[dict[str, float]]:
    """Returns the probability of each class, by its name, for each input; the model needs a head of classes.

    Args:
      inputs: texts or lists of token ids, or a single one; for a reranker, tuples of query and document.
      use_activation: False: the head's numbers as they are.
      adapter, progress: see `generate`.

    Raises:
      InvalidRequest, AdapterNotLoaded, GenerationFailed, Unavailable: see `generate`.
    """
    check_classifies(self.config)
    listed = [inputs] if _is_pair(inputs) else inputs
    if isinstance(listed, Sequence) and not isinstance(listed, str) and any(map(_is_pair, listed)):
      checked = [
        each if _is_pair(each) else _checked_prompt(each, f"inputs[{place}]") for place, each in enumerate(listed)
      ]
    else:
      checked = _list_prompts(listed, "inputs")
    activation = self.config.class_activation if use_activation else "none"
    vectors = self._run_inputs("classify", checked, adapter, progress)
    return [dict(zip(self.config.labels, make_probabilities(each, activation), strict=True)) for each in vectors]

  def load_adapter(self, lora_name: str, lora_path: str | os.PathLike[str], *, load_inplace: bool = False) -> None:
    """Loads a LoRA adapter, which later calls name by `adapter`; the LLM needs enable_lora=True. Compiles nothing.

    Args:
      lora_name: its name, 1 to 128 characters as in the server.
      lora_path: a folder that PEFT wrote.
      load_inplace: replace a loaded adapter of this name, if it has no requests.

    Raises:
      ConfigError: the LLM has no slots for adapters.
      CheckpointError: the folder holds no adapter that fits the model.
      InvalidRequest: the name cannot be used, no slot is free, or the old adapter has requests.
      Unavailable: this LLM is closed.
    """
    self._check_open()
    if self._read_adapter is None:
      raise ConfigError("this LLM has no slots for LoRA adapters; make it with enable_lora=True")
    check_adapter_name(lora_name, self.model_name)
    self._thread.engine.check_adapter_load(lora_name, load_inplace)
    with self._reading:
      self._thread.engine.check_adapter_load(lora_name, load_inplace)  # again: another thread may have come first
      weights = self._read_adapter(os.fspath(lora_path))
      self._thread.load_adapter(lora_name, weights, load_inplace).result()

  def unload_adapter(self, lora_name: str) -> None:
    """Refuses new requests of an adapter; its slot is free when its last request has ended.

    Raises:
      AdapterNotLoaded: no adapter of this name takes requests.
      Unavailable: this LLM is closed.
    """
    self._check_open()
    self._thread.engine.unload_adapter(lora_name)

  def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Returns a text's token ids, by default with tokens such as BOS in front. Raises NoTokenizer, InvalidRequest."""
    return self._need_tokenizer().encode(text, add_special_tokens=add_special_tokens)

  def detokenize(self, token_ids: Sequence[int]) -> str:
    """Returns the text of token ids, without special tokens. Raises NoTokenizer."""
    return self._need_tokenizer().decode(list(token_ids))

  @property
  def engine(self) -> Engine:
    """The engine, for its `stats`. Raises Unavailable after `close`."""
    self._check_open()
    return self._thread.engine

  def close(self) -> None:
    """Ends every request and frees the thread, the weights and the KV pool. May be called twice."""
    self._finalizer()
    gc.collect()  # the engine's parts form cycles; this frees the device arrays at once

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _check_open(self) -> None:
    if not self._finalizer.alive:
      raise Unavailable("this LLM is closed; make another one")

  def _need_tokenizer(self) -> Tokenizer:
    if self.tokenizer is None:
      raise NoTokenizer("has no tokenizer; send and read token ids", field=f"the model {self.model_name}")
    return self.tokenizer

  def _run_prompts(
    self,
    what: str,
    prompts: Sequence[Prompt],
    sampling: Sampling | Mapping[str, Any],
    adapter: Adapters,
    progress: bool | None,
  ) -> list[RequestOutput]:
    self._check_open()
    if not prompts:
      return []
    is_ready = isinstance(sampling, Mapping)
    options = [sampling] * len(prompts) if is_ready else _list_options(sampling, len(prompts))
    names = self._list_adapters(adapter, len(prompts))
    calls = []
    for place, (prompt, chosen, name) in enumerate(zip(prompts, options, names, strict=True)):
      try:
        calls.append(self._make_call(prompt, chosen, name))
      except EngineError as error:
        if len(prompts) > 1:
          error.add_note(describe_place(place))
        raise
    job = Job(prompts, calls)
    self._run_job(what, job, progress)
    return job.read_outputs()

  def _run_inputs(self, what: str, inputs: Sequence[Any], adapter: Adapters, progress: bool | None) -> list[Vector]:
    """Returns the raw embedding of each input, or a head's numbers for it."""
    self._check_open()
    if not inputs:
      return []
    names = self._list_adapters(adapter, len(inputs))
    prompts = tokenize_inputs(self.tokenizer, self.config, inputs, None, "inputs")
    calls = [make_embedding_call(prompt, adapter=name) for prompt, name in zip(prompts, names, strict=True)]
    for place, call in enumerate(calls):
      try:
        validate_request(self.config, Request("", call.prompt_token_ids, call.params[0]))
      except EngineError as error:
        if len(calls) > 1:
          error.add_note(describe_place(place))
        raise
    job = Job(inputs, calls)
    self._run_job(what, job, progress)
    return [read_vector(generation.outputs[0].embedding) for _, generation in sorted(job.finished.items())]

  def _run_job(self, what: str, job: Job, progress: bool | None) -> None:
    """Waits until all requests of a job are finished."""
    self._thread.submit_job(job)
    try:
      with show_progress(what, len(job.calls), progress) as bar:
        while bar is not None and not concurrent.futures.wait((job.future,), _LOOK_S).done:
          advance_bar(bar, job.num_ended)
        job.future.result()
        advance_bar(bar, job.num_ended)
    except BaseException:  # including Ctrl-C
      self._thread.cancel_job(job)
      raise

  def _list_adapters(self, adapter: Adapters, count: int) -> list[str]:
    """Returns the name of each prompt's adapter, "" for none. Raises InvalidRequest, AdapterNotLoaded."""
    names = [adapter] * count if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != count or not all(name is None or isinstance(name, str) for name in names):
      raise InvalidRequest(
        f"={adapter!r:.80} is not allowed for {count} prompts; send a name, or a list of a name or None for each",
        field="adapter",
      )
    loaded = [each.name for each in self._thread.engine.adapters() if each.state == AdapterState.LOADED.value]
    for name in names:
      if name and name not in loaded:
        remedy = "call load_adapter first" if self.config.enable_lora else "make the LLM with enable_lora=True"
        raise AdapterNotLoaded(
          f"={name!r:.80} is no loaded adapter (loaded: {', '.join(loaded) or 'none':.400}); {remedy}", field="adapter"
        )
    return [name or "" for name in names]

  def _make_call(self, prompt: Prompt, options: Mapping[str, Any], adapter: str) -> GenerationCall:
    """Returns a request after the server's validation. The engine checks lengths and sampling values on submission."""
    check_generates(self.config)
    request = _make_request(prompt, options)
    token_ids = prompt_token_ids(request, self.tokenizer)
    call = make_generation_call(request, self.config, self.tokenizer, token_ids, self.defaults, adapter)
    if request.HasField("constraint"):
      assert self._compiler is not None, "make_generation_call needs a tokenizer for a constraint"
      grammar = self._compiler.compile(request.constraint, request.tenant)
      call = dataclasses.replace(call, constraints=tuple(grammar.copy() for _ in call.params))
    return call

  def _join_pair(self, prompt: Prompt, continuation: Prompt, place: int) -> tuple[list[int], int]:
    """Returns the token ids of both, and the index of the continuation's first token."""
    if isinstance(prompt, str) and isinstance(continuation, str):
      whole = self.tokenize(prompt + continuation)
      first = len(self.tokenize(prompt))
    elif not isinstance(prompt, str) and not isinstance(continuation, str):
      whole, first = cast(list[int], [*prompt, *continuation]), len(prompt)
    else:
      raise InvalidRequest(
        "is a text where its prompt is token ids, or the other way round; send both of one kind",
        field=f"continuations[{place}]",
      )
    if not 1 <= first < len(whole):
      raise InvalidRequest(
        f"={continuation!r:.80} adds no token to prompts[{place}]={prompt!r:.80}, or that has none; send at least one "
        "token of each",
        field=f"continuations[{place}]",
      )
    return whole, first


def _find_model_folder(model: str, text: ModelSettings, progress: bool | None) -> pathlib.Path:
  """Returns the model's folder; downloads missing files of a named model. Raises ConfigError, CheckpointError."""
  if model == "demo":
    return DEMO_MODEL
  from server.model_source.download_watch import DownloadWatch
  from server.model_source.resolve_model import resolve_model_folder

  with show_parts(progress) as advance:
    watch = DownloadWatch(_log.info, advance)
    return resolve_model_folder(model, revision=text.revision, cache_dir=text.model_cache_dir, watch=watch)


def _list_prompts(prompts: Any, field: str = "prompts") -> list[Prompt]:
  """Returns one prompt or many as a list. Raises InvalidRequest."""
  prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
  if isinstance(prompts, str):
    return [prompts]
  if not isinstance(prompts, Sequence):
    raise InvalidRequest(f"={prompts!r:.80} is not allowed: send a text, token ids, or a list of them", field=field)
  if prompts and _holds_integers(prompts):
    return [list(map(int, prompts))]
  return [_checked_prompt(prompt, f"{field}[{place}]") for place, prompt in enumerate(prompts)]


def _checked_prompt(prompt: Any, field: str) -> Prompt:
  prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
  if isinstance(prompt, str):
    return prompt
  if isinstance(prompt, Sequence) and _holds_integers(prompt):
    return list(map(int, prompt))
  raise InvalidRequest(f"={prompt!r:.80} is not allowed: send a text or a list of token ids", field=field)


def _is_pair(value: Any) -> bool:
  return isinstance(value, tuple) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _holds_integers(values: Sequence[Any]) -> bool:
  return all(issubclass(kind, numbers.Integral) for kind in set(map(type, values)))


def _list_chats(messages: Any) -> list[Prompt]:
  """Returns one conversation or many as a list. Raises InvalidRequest."""
  chats = [messages] if any(isinstance(item, Mapping) for item in messages) else messages
  for place, chat in enumerate(chats):
    for number, message in enumerate(chat):
      fields = set(message) if isinstance(message, Mapping) else set()
      if fields != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
        raise InvalidRequest(
          f'={message!r:.80} is not allowed: send a mapping with the texts "role" and "content", and no more',
          field=f"messages[{number}]" if chats[0] is messages else f"messages[{place}][{number}]",
        )
  return [list(chat) for chat in chats]


def _list_options(sampling: Any, count: int) -> list[Mapping[str, Any]]:
  """Returns the options of each of `count` prompts. Raises InvalidRequest."""
  if sampling is None or isinstance(sampling, SamplingParams):
    return [{} if sampling is None else sampling.options()] * count
  if isinstance(sampling, Sequence) and all(isinstance(each, SamplingParams) for each in sampling):
    if len(sampling) == count:
      return [each.options() for each in sampling]
    raise InvalidRequest(
      f"has {len(sampling)} entries for {count} prompts; send one for each, or one for all", field="sampling_params"
    )
  raise InvalidRequest(
    f"={sampling!r:.80} is not allowed: send SamplingParams, or a list of one for each prompt", field="sampling_params"
  )


def _make_request(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerateRequest:
  """Returns the sluice.v1 message. Raises InvalidRequest for a value that its field cannot hold."""
  try:
    return make_generate_request(prompt, cast(Options, options))
  except (TypeError, ValueError) as error:
    for name, value in options.items():
      try:
        make_generate_request("", cast(Options, {name: value}))
      except (TypeError, ValueError) as found:
        raise InvalidRequest(
          f"={value!r:.80} is not allowed: {str(found):.200}; SamplingParams has the type of each field", field=name
        ) from None
    raise InvalidRequest(f"is not allowed: {str(error):.200}; send a text or token ids", field="prompt") from None


def _iterate_pieces(thread: EngineThread, call: GenerationCall) -> Iterator[Piece]:
  pieces: Pieces = queue.SimpleQueue()
  future = thread.open_stream(call, pieces)
  try:
    while (piece := pieces.get()) is not None:
      if isinstance(piece, BaseException):
        raise piece
      yield piece
  finally:
    future.cancel()
