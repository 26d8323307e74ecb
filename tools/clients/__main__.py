"""Runs published clients, unchanged, against a real server on the demo model; reports which work. Judges no figure.

  python -m tools.clients [--python=.venv-clients/bin/python] [--only=openai,langchain]     # make clients

openai: the official client, from Sluice's own environment. responses: the same, over the Responses API. langchain:
ChatOpenAI, streamed, with a schema, with tools. openai-agents: an agent with a tool.
lm-eval: local-completions with its remote tokenizer, log likelihoods and generation, on tasks written here.
lm-eval-in-process: the same tasks on an LLM in lm-eval's process (extensions.python_api.lm_eval_adapter), with the same
answers.
inference-perf: Kubernetes' benchmark, completions and chats streamed at a constant rate. smg: the stubs of its router,
over vllm.grpc.engine. They have their own environment (tools/clients/requirements.txt).
anthropic: Anthropic's client, from Sluice's own environment: streams, counts tokens, has a tool called.
openai-node, anthropic-node: the official clients for Node. codex, claude-code: one turn of Codex CLI, and of Claude
Code. They come from tools/clients/package.json where there is npm.
vllm: `vllm bench serve`, if make peers has made its environment. Exit code 1 if one fails; the tool prints the folder
with their output.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import Any
import urllib.request

from engine.errors import EngineError
from tools.arguments import CommandParser
from tools.measure import ROOT
from tools.peers.__main__ import ENVIRONMENTS
from tools.server_process import RunningServer

_DEMO = ROOT / "models" / "demo"
_PATIENCE_S = 240.0
# Where make clients installs tools/clients/package.json.
_NODE_MODULES = ROOT / ".node-clients" / "node_modules"
# Its own command needs a package called vllm, which CPU builds are not.
_VLLM = ROOT / ENVIRONMENTS["vllm"] / "bin" / "python"
_VLLM_BENCH = (
  "from argparse import ArgumentParser; from vllm.benchmarks.serve import add_cli_args, main\n"
  "parser = ArgumentParser(); add_cli_args(parser); main(parser.parse_args())\n"
)
# No access to a hub, and no usage reports.
_OFFLINE = {
  "HF_HUB_OFFLINE": "1",
  "HF_DATASETS_OFFLINE": "1",
  "TRANSFORMERS_OFFLINE": "1",
  "HF_DATASETS_DISABLE_TELEMETRY": "1",
}


@dataclasses.dataclass(frozen=True)
class Address:
  """The server's addresses: of HTTP, and as HOST:PORT of gRPC."""

  url: str
  target: str


class Failed(Exception):
  """A client did not do what its users expect; the text names the log."""


def run(command: Sequence[str], folder: pathlib.Path, name: str, variables: Mapping[str, str] | None = None) -> str:
  """Runs a client with extra environment variables until it ends; returns its output. Raises Failed."""
  log = folder / f"{name}.log"
  environment = {**os.environ, **_OFFLINE, "HF_HOME": str(folder / "hf"), **(variables or {})}
  with open(log, "w", encoding="utf-8") as file:
    try:
      code = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        timeout=_PATIENCE_S,
        check=False,
      ).returncode
    except subprocess.TimeoutExpired:
      raise Failed(f"did not end within {_PATIENCE_S:g} s; see {log}") from None
  text = log.read_text("utf-8", errors="replace")
  if code:
    raise Failed(f"exit code {code}: {(text.strip().splitlines() or ['no output'])[-1]}; see {log}")
  return text


def openai(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Gets whole and streamed answers with the official client."""
  del python
  script = (
    "import sys; from openai import OpenAI\n"
    "client = OpenAI(base_url=sys.argv[1], api_key='unused'); model = sys.argv[2]\n"
    "assert [each.id for each in client.models.list()] == [model]\n"
    "ask = dict(model=model, messages=[{'role': 'user', 'content': '37 + 5 = ?'}], max_tokens=12, temperature=0)\n"
    "whole = client.chat.completions.create(**ask).choices[0].message.content\n"
    "pieces = [c.choices[0].delta.content or '' for c in client.chat.completions.create(**ask, stream=True)]\n"
    "assert ''.join(pieces) == whole; print(repr(whole))\n"
  )
  return run([sys.executable, "-c", script, f"{at.url}/v1", model], folder, "openai").strip()


def responses(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_responses.py with the official client."""
  del python
  script = str(ROOT / "tools" / "clients" / "use_responses.py")
  return run([sys.executable, script, f"{at.url}/v1", model], folder, "responses").strip()


def openai_agents(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_agents.py."""
  script = str(ROOT / "tools" / "clients" / "use_agents.py")
  return run([python, script, f"{at.url}/v1", model], folder, "openai_agents").strip().splitlines()[-1]


def openai_node(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_openai_node.cjs."""
  del python
  script = str(ROOT / "tools" / "clients" / "use_openai_node.cjs")
  variables = {"NODE_PATH": str(_NODE_MODULES)}
  return run(["node", script, f"{at.url}/v1", model], folder, "openai_node", variables).strip()


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


def codex(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs one turn of Codex CLI, which streams a response with tools."""
  del python
  home = folder / "codex"
  home.mkdir()
  (home / "instructions.md").write_text("Be brief.\n", "utf-8")
  (home / "config.toml").write_text(_CODEX.format(model=model, home=home, url=at.url), "utf-8")
  command = [str(_NODE_MODULES / ".bin" / "codex"), "exec", "--skip-git-repo-check", "--json", "37 + 5 = ?"]
  lines = run(command, folder, "codex", {"CODEX_HOME": str(home)}).splitlines()
  events = [json.loads(line) for line in lines if line.startswith("{")]
  usage = [event["usage"] for event in events if event["type"] == "turn.completed"]
  if not usage:
    raise Failed(f"the turn did not end; see {folder / 'codex.log'}")
  items = [event["item"] for event in events if event["type"] == "item.completed"]
  said = [item["text"] for item in items if item["type"] == "agent_message"]
  return f"{''.join(said)!r} after {usage[0]['input_tokens']} tokens"


def langchain(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_langchain.py."""
  script = str(ROOT / "tools" / "clients" / "use_langchain.py")
  return run([python, script, f"{at.url}/v1", model], folder, "langchain").strip().splitlines()[-1]


def smg(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_smg.py."""
  script = str(ROOT / "tools" / "clients" / "use_smg.py")
  return run([python, script, at.target, at.url], folder, "smg").strip().splitlines()[-1]


# Each lm-eval task's output type and metric.
_TASKS: dict[str, tuple[dict[str, Any], str]] = {
  "sluice_choice": (
    {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"},
    "acc",
  ),
  "sluice_generate": (
    {
      "output_type": "generate_until",
      "doc_to_target": "answer",
      "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0.0},
    },
    "exact_match",
  ),
}


def _task(name: str, docs: pathlib.Path) -> str:
  """Returns a task's file: JSON, which is YAML too."""
  asked, metric = _TASKS[name]
  shared = {
    "task": name,
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(docs)}},
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True}],
    "metadata": {"version": 1},
  }
  return json.dumps(shared | asked)


def _evaluate(command: Sequence[str], name: str, folder: pathlib.Path) -> tuple[dict[str, Any], list[Any]]:
  """Runs both tasks by an lm-eval command; returns its results, and the model's answers to every document."""
  tasks, docs, output = folder / "tasks", folder / "docs.jsonl", folder / name
  tasks.mkdir(exist_ok=True)
  lines = [
    {"question": f"{left} + {right} =", "choices": [f" {left + right}", " no"], "gold": 0, "answer": f"{left + right}"}
    for left, right in ((1, 2), (3, 4), (12, 7), (30, 5))
  ]
  docs.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
  for task in _TASKS:
    (tasks / f"{task}.yaml").write_text(_task(task, docs), "utf-8")
  asked = ["--tasks", ",".join(_TASKS), "--include_path", str(tasks), "--output_path", str(output), "--log_samples"]
  run([*command, *asked], folder, name)
  found = sorted(output.rglob("results_*.json"))
  if not found:
    raise Failed("wrote no results")
  answers = []
  for task in _TASKS:
    (samples,) = output.rglob(f"samples_{task}_*.jsonl")
    kept = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    answers += [each["filtered_resps"] for each in sorted(kept, key=lambda each: each["doc_id"])]
  return json.loads(found[-1].read_text("utf-8"))["results"], answers


def _say_results(results: dict[str, Any]) -> str:
  return f"acc {results['sluice_choice']['acc,none']:g}, exact {results['sluice_generate']['exact_match,none']:g}"


def lm_eval(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs two tasks of a few questions each: log likelihoods of choices, and generation until a newline."""
  where = f"model={model},base_url={at.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
  command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", where]
  results, _ = _evaluate(command, "lm_eval", folder)
  return _say_results(results)


def lm_eval_in_process(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs the same tasks on an LLM in lm-eval's process; its answers must be the server's."""
  where = f"model={model},base_url={at.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
  command = [python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", where]
  _, served = _evaluate(command, "lm_eval_served", folder)
  # Sluice's packages come last: they add JAX, and leave lm-eval its own versions of what both need, such as tokenizers.
  code = (
    f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path.append({sysconfig.get_path('purelib')!r}); import runpy; "
  )
  code += "runpy.run_module('extensions.python_api.lm_eval_adapter', run_name='__main__', alter_sys=True)"
  command = [python, "-c", code, "run", "--model", "sluice", "--model_args", f"model={_DEMO},add_bos_token=False"]
  results, answers = _evaluate(command, "lm_eval_in_process", folder)
  for found, wanted in zip(answers, served, strict=True):
    if not _agree(found, wanted):
      raise Failed(f"the LLM answers {found} where the server answers {wanted}; see {folder}")
  return f"{_say_results(results)}, {len(answers)} answers equal to the server's"


def _agree(found: Any, wanted: Any) -> bool:
  """Whether two answers are the same: texts and flags exactly, log likelihoods to a thousandth."""
  if isinstance(found, list) and isinstance(wanted, list):
    return len(found) == len(wanted) and all(map(_agree, found, wanted))
  try:
    return math.isclose(float(str(found)), float(str(wanted)), abs_tol=1e-3)
  except ValueError:
    return found == wanted


def inference_perf(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Streams completions, then chats, for a few seconds; every request must succeed."""
  said = []
  for api in ("completion", "chat"):
    reports = folder / f"inference_perf_{api}"
    spread = {"min": 8, "max": 32, "mean": 16, "std_dev": 4, "total_count": 40}
    data: dict[str, Any] = {"type": "random"} | {f"{way}put_distribution": spread for way in ("in", "out")}
    if api == "chat":  # the only data source that needs no download
      shared = {
        "num_groups": 4,
        "num_prompts_per_group": 10,
        "system_prompt_len": 16,
        "question_len": 8,
        "output_len": 16,
      }
      data = {"type": "shared_prefix", "shared_prefix": shared}
    config = {
      "api": {"type": api, "streaming": True},
      "data": data,
      "load": {"type": "constant", "interval": 0.5, "num_workers": 1, "stages": [{"rate": 8, "duration": 4}]},
      "server": {"type": "vllm", "model_name": model, "base_url": at.url, "ignore_eos": True},
      "tokenizer": {"pretrained_model_name_or_path": str(_DEMO)},
      "storage": {"local_storage": {"path": str(reports)}},
    }
    path = folder / f"inference_perf_{api}.json"  # JSON is YAML
    path.write_text(json.dumps(config), "utf-8")
    program = str(pathlib.Path(python).parent / "inference-perf")
    run([program, "--config_file", str(path)], folder, f"inference_perf_{api}")
    found = sorted(reports.rglob("*summary*.json"))
    if not found:
      raise Failed(f"{api}: wrote no summary into {reports}")
    summary = json.loads(found[-1].read_text("utf-8"))
    done, failed = summary["successes"]["count"], summary["failures"]["count"]
    if failed or not done:
      raise Failed(f"{api}: {done} requests succeeded and {failed} failed; see {reports}")
    said.append(f"{done} {api}s")
  return ", ".join(said)


def vllm(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Sends completions, then chats; every request must succeed, with all its requested tokens."""
  del python
  said = []
  for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    asked = {
      "backend": backend,
      "base-url": at.url,
      "endpoint": path,
      "model": model,
      "tokenizer": str(_DEMO),
      "dataset-name": "random",
      "random-input-len": "20",
      "random-output-len": "12",
      "num-prompts": "16",
      "result-dir": str(folder),
      "result-filename": f"vllm_{backend}.json",
    }
    arguments = [part for name, value in asked.items() for part in (f"--{name}", value)]
    run([str(_VLLM), "-c", _VLLM_BENCH, *arguments, "--ignore-eos", "--save-result"], folder, f"vllm_{backend}")
    result = json.loads((folder / f"vllm_{backend}.json").read_text("utf-8"))
    done, tokens = result["completed"], result["total_output_tokens"]
    if (done, tokens) != (16, 16 * 12):
      raise Failed(f"{backend}: {done} of 16 requests succeeded, with {tokens} of {16 * 12} tokens")
    said.append(f"{done} by {backend}")
  return ", ".join(said)


def anthropic(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_anthropic.py."""
  del python
  script = str(ROOT / "tools" / "clients" / "use_anthropic.py")
  return run([sys.executable, script, at.url, model], folder, "anthropic").strip()


def anthropic_node(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs tools/clients/use_anthropic_node.cjs."""
  del python
  script = str(ROOT / "tools" / "clients" / "use_anthropic_node.cjs")
  return run(["node", script, at.url, model], folder, "anthropic_node", {"NODE_PATH": str(_NODE_MODULES)}).strip()


def claude_code(at: Address, model: str, python: str, folder: pathlib.Path) -> str:
  """Runs one turn of Claude Code with one tool, since all its tools exceed the demo model's 4096 tokens."""
  del python
  home = folder / "claude"
  home.mkdir()
  variables = {
    "HOME": str(home),
    "CLAUDE_CONFIG_DIR": str(home / "config"),
    "ANTHROPIC_BASE_URL": at.url,
    "ANTHROPIC_API_KEY": "unused",
    "ANTHROPIC_MODEL": model,
    "ANTHROPIC_SMALL_FAST_MODEL": model,
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
  }
  program = str(_NODE_MODULES / ".bin" / "claude")
  command = [program, "-p", "--output-format", "json", "--tools", "Read", "--system-prompt", "Be brief.", "37 + 5 = ?"]
  turn = json.loads(run(command, folder, "claude_code", variables).strip().splitlines()[-1])
  if turn["is_error"]:
    raise Failed(f"{turn['result']}; see {folder / 'claude_code.log'}")
  usage = turn["usage"]
  return f"{turn['result']!r} after {usage['input_tokens'] + usage['cache_read_input_tokens']} tokens"


CLIENTS: dict[str, Callable[[Address, str, str, pathlib.Path], str]] = {
  "openai": openai,
  "responses": responses,
  "langchain": langchain,
  "lm-eval": lm_eval,
  "lm-eval-in-process": lm_eval_in_process,
  "inference-perf": inference_perf,
  "smg": smg,
  "openai-agents": openai_agents,
  "openai-node": openai_node,
  "codex": codex,
  "anthropic": anthropic,
  "anthropic-node": anthropic_node,
  "claude-code": claude_code,
  "vllm": vllm,
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  parser = CommandParser("tools.clients", __doc__)
  parser.add_argument("--python", default=str(ROOT / ".venv-clients" / "bin" / "python"), help="of the clients")
  needed = {"vllm": _VLLM} | dict.fromkeys(("openai-node", "codex", "anthropic-node", "claude-code"), _NODE_MODULES)
  present = [name for name in CLIENTS if name not in needed or needed[name].exists()]
  parser.add_argument("--only", default=",".join(present), help="clients to run, separated by commas")
  args = parser.parse_args(argv)
  chosen = args.only.split(",")
  if unknown := set(chosen) - CLIENTS.keys():
    parser.error(f"--only: {', '.join(sorted(unknown))} is not one of {', '.join(CLIENTS)}")
  if not pathlib.Path(args.python).exists() and set(chosen) - {"openai", "responses", "anthropic", *needed}:
    parser.error(f"--python={args.python} does not exist; make clients sets it up")
  for name in chosen:
    if name in needed and not needed[name].exists():
      parser.error(f"{needed[name]} does not exist; make {'peers' if name == 'vllm' else 'clients'} sets it up")
  folder = pathlib.Path(tempfile.mkdtemp(prefix="sluice-clients-"))
  port_file = folder / "http_port"
  flags = [f"--model={_DEMO}", "--http_port=0", f"--http_port_file={port_file}", "--strict_requests=false"]
  flags.append("--enable_vllm_api")
  failures = 0
  try:
    with RunningServer(flags, folder / "server.log") as server:
      at = Address(f"http://127.0.0.1:{port_file.read_text('utf-8').strip()}", server.target)
      with urllib.request.urlopen(f"{at.url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
      for name in chosen:
        started = time.monotonic()
        try:
          said = CLIENTS[name](at, model, str(pathlib.Path(args.python).absolute()), folder)
        except Failed as error:
          failures += 1
          said = f"FAILED: {error}"
        print(f"{name:20}{time.monotonic() - started:6.1f} s  {said}", flush=True)
  except EngineError as error:
    return parser.failed(error)
  print(f"logs: {folder}")
  return int(failures > 0)


if __name__ == "__main__":
  sys.exit(main())
