"""The published clients, where each is installed, and what its run requests of a server. Runs none."""

from collections.abc import Callable
import dataclasses

from tools.clients import evaluations, programs
from tools.clients.environments import (
  GO,
  GRPCURL,
  NODE,
  OWN,
  PYTHON,
  PYTHON_OPENAI2,
  PYTHON_VLLM,
  Environment,
  NodeEnvironment,
  Place,
  PythonEnvironment,
)
from tools.measure import ROOT

_PROTO = str(ROOT / "server" / "proto" / "sluice.proto")


@dataclasses.dataclass(frozen=True)
class Client:
  """A published client.

  Attributes:
    package: its name in the registry.
    environment: where it is installed.
    requests: what its run requests, for a table.
    run: requests it; returns what came out. Raises Failed.
  """

  package: str
  environment: Environment
  requests: str
  run: Callable[[Place], str]


def _over_http(environment: PythonEnvironment | NodeEnvironment, script: str) -> Callable[[Place], str]:
  return lambda place: environment.run_script(script, place, f"{place.url}/v1", place.model)


def _over_messages(environment: PythonEnvironment | NodeEnvironment, script: str) -> Callable[[Place], str]:
  return lambda place: environment.run_script(script, place, place.url, place.model)


def _over_grpc(environment: PythonEnvironment | NodeEnvironment, script: str) -> Callable[[Place], str]:
  return lambda place: environment.run_script(script, place, place.target, _PROTO)


def _smg(place: Place) -> str:
  return PYTHON.run_script("use_smg.py", place, place.target, place.url)


CLIENTS: dict[str, Client] = {
  "openai": Client(
    "openai",
    OWN,
    "chat, stream, parsed object, tool, completion, embeddings, batch, error",
    _over_http(OWN, "use_openai.py"),
  ),
  "responses": Client(
    "openai",
    OWN,
    "response, stream, tool there and back, stored items",
    _over_http(OWN, "use_responses.py"),
  ),
  "anthropic": Client(
    "anthropic",
    OWN,
    "message, stream, tokens counted, tool there and back, error",
    _over_messages(OWN, "use_anthropic.py"),
  ),
  "langchain": Client(
    "langchain-openai", PYTHON, "chat, stream, several at once, schema, tool", _over_http(PYTHON, "use_langchain.py")
  ),
  "openai-agents": Client(
    "openai-agents", PYTHON, "agent, agent with a tool whole and streamed", _over_http(PYTHON, "use_agents.py")
  ),
  "instructor": Client(
    "instructor",
    PYTHON,
    "object by schema, tool and strict tool, whole and in parts",
    _over_http(PYTHON, "use_instructor.py"),
  ),
  "pydantic-ai": Client(
    "pydantic-ai-slim",
    PYTHON,
    "agent whole, streamed and continued; object by schema and by tool; chats and responses",
    _over_http(PYTHON, "use_pydantic_ai.py"),
  ),
  "llm": Client("llm", PYTHON, "prompt, continued conversation, schema, completion", programs.llm),
  "litellm": Client(
    "litellm",
    PYTHON_OPENAI2,
    "chat, stream, tool, schema, embeddings, error by two providers; response, completion",
    _over_http(PYTHON_OPENAI2, "use_litellm.py"),
  ),
  "llama-index": Client(
    "llama-index-llms-openai-like",
    PYTHON_OPENAI2,
    "chat, stream, completion, object, answer from an index of embeddings",
    _over_http(PYTHON_OPENAI2, "use_llama_index.py"),
  ),
  "dspy": Client(
    "dspy",
    PYTHON_OPENAI2,
    "chat, typed prediction, several at once, embeddings",
    _over_http(PYTHON_OPENAI2, "use_dspy.py"),
  ),
  "smolagents": Client(
    "smolagents",
    PYTHON_OPENAI2,
    "chat, stream, tool, agent whole and streamed",
    _over_http(PYTHON_OPENAI2, "use_smolagents.py"),
  ),
  "haystack": Client(
    "haystack-ai",
    PYTHON_OPENAI2,
    "chat, stream, schema, pipeline with embeddings",
    _over_http(PYTHON_OPENAI2, "use_haystack.py"),
  ),
  "lm-eval": Client(
    "lm-eval", PYTHON, "two tasks: log likelihoods, generation; its remote tokenizer", evaluations.lm_eval
  ),
  "lm-eval-in-process": Client(
    "lm-eval", PYTHON, "the same tasks on an LLM in its process, with the same answers", evaluations.lm_eval_in_process
  ),
  "inference-perf": Client(
    "inference-perf", PYTHON, "streamed completions and chats at a constant rate", evaluations.inference_perf
  ),
  "openai-node": Client(
    "openai", NODE, "chat, stream, response, tool there and back", _over_http(NODE, "use_openai_node.cjs")
  ),
  "anthropic-node": Client(
    "@anthropic-ai/sdk",
    NODE,
    "message, stream, tokens counted, tool there and back, error",
    _over_messages(NODE, "use_anthropic_node.cjs"),
  ),
  "ai-sdk": Client(
    "ai", NODE, "text, stream, object whole and in parts, tool, embeddings", _over_http(NODE, "use_ai_sdk.cjs")
  ),
  "langchain-node": Client(
    "@langchain/openai",
    NODE,
    "chat, stream, several at once, schema, tool, embeddings; chats and responses",
    _over_http(NODE, "use_langchain_node.cjs"),
  ),
  "openai-agents-node": Client(
    "@openai/agents",
    NODE,
    "agent whole and streamed, with a tool, with a schema; chats and responses",
    _over_http(NODE, "use_agents_node.cjs"),
  ),
  "codex": Client("@openai/codex", NODE, "one turn with tools", programs.codex),
  "claude-code": Client("@anthropic-ai/claude-code", NODE, "one turn with one tool", programs.claude_code),
  "continue": Client("@continuedev/cli", NODE, "one turn", programs.continue_cli),
  "grpcio": Client(
    "grpcio",
    PYTHON,
    "stream, unary, tokenize, embed, cancel, deadline, error details",
    _over_grpc(PYTHON, "use_grpc.py"),
  ),
  "grpc-node": Client("@grpc/grpc-js", NODE, "stream, cancel, deadline, error", _over_grpc(NODE, "use_grpc_node.cjs")),
  "smg": Client("smg-grpc-proto", PYTHON, "every method of vllm.grpc.engine", _smg),
  "buf": Client("buf-bin", OWN, "list, stream by reflection and by the proto", programs.buf),
  "grpcurl": Client("grpcurl", GRPCURL, "list, describe, stream by reflection", programs.grpcurl),
  "go": Client("go, google.golang.org/grpc", GO, "stream, cancel, deadline", programs.go),
  "vllm": Client("vllm", PYTHON_VLLM, "its benchmark: completions and chats", evaluations.vllm),
}
