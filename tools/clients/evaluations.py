"""Evaluations and benchmarks as clients: lm-eval against a server and in its own process, inference-perf, vLLM's."""

from collections.abc import Sequence
import functools
import json
import math
import pathlib
import sysconfig
from typing import Any

from tools.clients.environments import DEMO, PYTHON, PYTHON_VLLM, Failed, Place, run
from tools.measure import ROOT

# Its own command needs a package called vllm, which CPU builds are not.
_VLLM_BENCH = (
  "from argparse import ArgumentParser; from vllm.benchmarks.serve import add_cli_args, main\n"
  "parser = ArgumentParser(); add_cli_args(parser); main(parser.parse_args())\n"
)

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


@functools.cache
def _evaluate_server(place: Place) -> tuple[dict[str, Any], list[Any]]:
  """Runs both tasks against the server, once."""
  where = f"model={place.model},base_url={place.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
  command = [PYTHON.program("python"), "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", where]
  return _evaluate(command, "lm_eval", place.folder)


def lm_eval(place: Place) -> str:
  """Runs two tasks of a few questions each: log likelihoods of choices, and generation until a newline."""
  return _say_results(_evaluate_server(place)[0])


def lm_eval_in_process(place: Place) -> str:
  """Runs the same tasks on an LLM in lm-eval's process; its answers must be the server's."""
  _, served = _evaluate_server(place)
  # Sluice's packages come last: they add JAX, and leave lm-eval its own versions of what both need, such as tokenizers.
  code = (
    f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path.append({sysconfig.get_path('purelib')!r}); import runpy; "
  )
  code += "runpy.run_module('extensions.python_api.lm_eval_adapter', run_name='__main__', alter_sys=True)"
  command = [
    PYTHON.program("python"),
    "-c",
    code,
    "run",
    "--model",
    "sluice",
    "--model_args",
    f"model={DEMO},add_bos_token=False",
  ]
  results, answers = _evaluate(command, "lm_eval_in_process", place.folder)
  for found, wanted in zip(answers, served, strict=True):
    if not _agree(found, wanted):
      raise Failed(f"the LLM answers {found} where the server answers {wanted}; see {place.folder}")
  return f"{_say_results(results)}, {len(answers)} answers equal to the server's"


def _agree(found: Any, wanted: Any) -> bool:
  """Whether two answers are the same: texts and flags exactly, log likelihoods to a thousandth."""
  if isinstance(found, list) and isinstance(wanted, list):
    return len(found) == len(wanted) and all(map(_agree, found, wanted))
  try:
    return math.isclose(float(str(found)), float(str(wanted)), abs_tol=1e-3)
  except ValueError:
    return found == wanted


def inference_perf(place: Place) -> str:
  """Streams completions, then chats, for a few seconds; every request must succeed."""
  said = []
  for api in ("completion", "chat"):
    reports = place.folder / f"inference_perf_{api}"
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
      "server": {"type": "vllm", "model_name": place.model, "base_url": place.url, "ignore_eos": True},
      "tokenizer": {"pretrained_model_name_or_path": str(DEMO)},
      "storage": {"local_storage": {"path": str(reports)}},
    }
    path = place.folder / f"inference_perf_{api}.json"  # JSON is YAML
    path.write_text(json.dumps(config), "utf-8")
    run([PYTHON.program("inference-perf"), "--config_file", str(path)], place.folder, f"inference_perf_{api}")
    found = sorted(reports.rglob("*summary*.json"))
    if not found:
      raise Failed(f"{api}: wrote no summary into {reports}")
    summary = json.loads(found[-1].read_text("utf-8"))
    done, failed = summary["successes"]["count"], summary["failures"]["count"]
    if failed or not done:
      raise Failed(f"{api}: {done} requests succeeded and {failed} failed; see {reports}")
    said.append(f"{done} {api}s")
  return ", ".join(said)


def vllm(place: Place) -> str:
  """Sends completions, then chats; every request must succeed, with all its requested tokens."""
  said = []
  for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    asked = {
      "backend": backend,
      "base-url": place.url,
      "endpoint": path,
      "model": place.model,
      "tokenizer": str(DEMO),
      "dataset-name": "random",
      "random-input-len": "20",
      "random-output-len": "12",
      "num-prompts": "16",
      "result-dir": str(place.folder),
      "result-filename": f"vllm_{backend}.json",
    }
    arguments = [part for name, value in asked.items() for part in (f"--{name}", value)]
    run(
      [PYTHON_VLLM.program("python"), "-c", _VLLM_BENCH, *arguments, "--ignore-eos", "--save-result"],
      place.folder,
      f"vllm_{backend}",
    )
    result = json.loads((place.folder / f"vllm_{backend}.json").read_text("utf-8"))
    done, tokens = result["completed"], result["total_output_tokens"]
    if (done, tokens) != (16, 16 * 12):
      raise Failed(f"{backend}: {done} of 16 requests succeeded, with {tokens} of {16 * 12} tokens")
    said.append(f"{done} by {backend}")
  return ", ".join(said)
