"""Programs of a command line as clients: one turn of each coding agent, `llm`, buf, grpcurl, and the client in Go."""

import json
import os
import pathlib
import shutil

from tools.clients.environments import NODE, OWN, PYTHON, Failed, Place, run
from tools.measure import ROOT

_QUESTION = "37 + 5 = ?"
_PROTO = "server/proto/sluice.proto"
_GENERATE = "sluice.v1.GenerationService/Generate"
# Where Debian's golang packages put sources.
_GO_SOURCES = "/usr/share/gocode"

# Codex with all its tools and instructions sends more than the demo model's 4096 tokens.
_CODEX = """model = "{model}"
model_provider = "sluice"
model_instructions_file = "{home}/instructions.md"
web_search = "disabled"
check_for_update_on_startup = false
[analytics]
enabled = false
[agents]
enabled = false
[features]
apps = false
goals = false
plugins = false
unbounded_connection_retries = false
view_image = false
[skills]
include_instructions = false
[model_providers.sluice]
name = "sluice"
base_url = "{url}/v1"
wire_api = "responses"
"""


def codex(place: Place) -> str:
  """Runs one turn of Codex CLI, which streams a response with tools."""
  home = place.folder / "codex"
  home.mkdir()
  (home / "instructions.md").write_text("Be brief.\n", "utf-8")
  (home / "config.toml").write_text(_CODEX.format(model=place.model, home=home, url=place.url), "utf-8")
  command = [NODE.program("codex"), "exec", "--skip-git-repo-check", "--json", _QUESTION]
  lines = run(command, place.folder, "codex", {"CODEX_HOME": str(home)}).splitlines()
  events = [json.loads(line) for line in lines if line.startswith("{")]
  usage = [event["usage"] for event in events if event["type"] == "turn.completed"]
  if not usage:
    raise Failed(f"the turn did not end; see {place.folder / 'codex.log'}")
  items = [event["item"] for event in events if event["type"] == "item.completed"]
  said = [item["text"] for item in items if item["type"] == "agent_message"]
  return f"{''.join(said)!r} after {usage[0]['input_tokens']} tokens"


def claude_code(place: Place) -> str:
  """Runs one turn of Claude Code with one tool, since all its tools exceed the demo model's 4096 tokens."""
  home = place.folder / "claude"
  home.mkdir()
  variables = {
    "HOME": str(home),
    "CLAUDE_CONFIG_DIR": str(home / "config"),
    "ANTHROPIC_BASE_URL": place.url,
    "ANTHROPIC_API_KEY": "unused",
    "ANTHROPIC_MODEL": place.model,
    "ANTHROPIC_SMALL_FAST_MODEL": place.model,
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
  }
  command = [NODE.program("claude"), "-p", "--output-format", "json", "--tools", "Read"]
  command += ["--system-prompt", "Be brief.", _QUESTION]
  turn = json.loads(run(command, place.folder, "claude_code", variables).strip().splitlines()[-1])
  if turn["is_error"]:
    raise Failed(f"{turn['result']}; see {place.folder / 'claude_code.log'}")
  usage = turn["usage"]
  return f"{turn['result']!r} after {usage['input_tokens'] + usage['cache_read_input_tokens']} tokens"


def continue_cli(place: Place) -> str:
  """Runs one turn of Continue's command line."""
  home = place.folder / "continue"
  home.mkdir()
  model = {
    "name": place.model,
    "provider": "openai",
    "model": place.model,
    "apiBase": f"{place.url}/v1",
    "apiKey": "unused",
    "roles": ["chat"],
    "contextLength": 4096,
    "defaultCompletionOptions": {"contextLength": 4096, "maxTokens": 64, "temperature": 0},
  }
  config = {"name": "sluice", "version": "0.0.1", "schema": "v1", "models": [model]}
  (home / "config.yaml").write_text(json.dumps(config), "utf-8")  # JSON is YAML
  command = [NODE.program("cn"), "-p", _QUESTION, "--config", str(home / "config.yaml")]
  said = run(command, place.folder, "continue", {"HOME": str(home)}).strip()
  if not said:
    raise Failed(f"the turn has no text; see {place.folder / 'continue.log'}")
  return repr(said.splitlines()[-1])


def llm(place: Place) -> str:
  """Gets an answer, continues its conversation, gets an object of a schema and a raw completion."""
  home = place.folder / "llm"
  home.mkdir()
  shared = {"model_name": place.model, "api_base": f"{place.url}/v1"}
  models = [
    {"model_id": "chat", **shared, "supports_schema": True, "supports_tools": True},
    {"model_id": "raw", **shared, "completion": True},
  ]
  (home / "extra-openai-models.yaml").write_text(json.dumps(models), "utf-8")  # JSON is YAML
  said = []
  for arguments in (
    ["-m", "chat", "-o", "temperature", "0", _QUESTION],
    ["-c", "-o", "max_tokens", "12", "--no-stream", "And 1 + 1?"],
    ["-m", "chat", "-o", "max_tokens", "100", "--schema", "sunny bool", "The weather in Oslo?"],
    ["-m", "raw", "-o", "max_tokens", "8", "Once upon a time"],
  ):
    variables = {"LLM_USER_PATH": str(home), "OPENAI_API_KEY": "unused"}
    said.append(run([PYTHON.program("llm"), *arguments], place.folder, f"llm_{len(said)}", variables).strip())
  if not isinstance(json.loads(said[2])["sunny"], bool) or not all(said):
    raise Failed(f"answered {said}; see {place.folder}")
  return f"{said[0]!r}, {said[2]}"


_REQUEST = json.dumps({"text": "Once upon a time", "sampling": {"temperature": 0}, "stopping": {"max_tokens": 5}})


def text_of_stream(output: str) -> str:
  """Joins the texts of JSON messages that follow each other, each from a line `{` to a line `}`."""
  messages = [json.loads(each + "}") for each in output.strip().removesuffix("}").split("\n}\n")]
  return "".join(delta.get("text", "") for message in messages for delta in message.get("deltas", []))


def buf(place: Place) -> str:
  """Lists services and streams a generation by reflection; streams it again by the proto alone."""
  command = [OWN.program("buf"), "curl", "--protocol", "grpc", "--http2-prior-knowledge"]
  at = f"http://{place.target}"
  services = run([*command, "--list-services", at], place.folder, "buf_list").split()
  streamed = run([*command, "--data", _REQUEST, f"{at}/{_GENERATE}"], place.folder, "buf_reflection")
  schema = ["--schema", str(ROOT / _PROTO)]
  by_proto = run([*command, *schema, "--data", _REQUEST, f"{at}/{_GENERATE}"], place.folder, "buf_schema")
  text = text_of_stream(streamed)
  if not text or text_of_stream(by_proto) != text or "sluice.v1.GenerationService" not in services:
    raise Failed(f"{text!r} by reflection; see {place.folder}")
  return f"{text!r}, {len(services)} services"


def grpcurl(place: Place) -> str:
  """Lists and describes services by reflection, and streams a generation."""
  program = [str(shutil.which("grpcurl")), "-plaintext"]
  services = run([*program, place.target, "list"], place.folder, "grpcurl_list").split()
  method = ["describe", "sluice.v1.GenerationService.Generate"]
  described = run([*program, place.target, *method], place.folder, "grpcurl_describe")
  streamed = run([*program, "-d", _REQUEST, place.target, _GENERATE], place.folder, "grpcurl")
  text = text_of_stream(streamed)
  if not text or "stream .sluice.v1.GenerateResponse" not in described or "sluice.v1.ModelService" not in services:
    raise Failed(f"{text!r}, {services}; see {place.folder}")
  return f"{text!r}, {len(services)} services"


def go(place: Place) -> str:
  """Builds tools/clients/go with stubs of the proto; it streams a generation, cancels one and meets a deadline."""
  home = place.folder / "go"
  stubs = home / "src"
  stubs.mkdir(parents=True)
  package = f"M{_PROTO}=sluice/v1"
  flags = [f"--go_out={stubs}", f"--go_opt={package}", f"--go-grpc_out={stubs}", f"--go-grpc_opt={package}"]
  run(["protoc", f"-I{ROOT}", *flags, _PROTO], place.folder, "go_protoc")
  variables = {"GO111MODULE": "off", "GOPATH": f"{home}{os.pathsep}{_GO_SOURCES}"}
  source = str(pathlib.Path(__file__).parent / "go" / "main.go")
  return run(["go", "run", source, place.target], place.folder, "go", variables).strip().splitlines()[-1]
