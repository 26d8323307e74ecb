"""The comparison with peers: tokens and ties, children that take turns, GGUF, the report. No peer is needed."""

import json
import pathlib
import sys
import time
import types

import numpy as np
import pytest

from engine.errors import ConfigError
from tests.tools.conftest import run_module
from tools.peers import __main__ as peers
from tools.peers import agreement, face, report, run_openvino, write_gguf
from tools.peers.process import PeerProcess, read_outcomes
from tools.report.latency import Outcome
from tools.workload import WorkRequest, write_requests

# A peer in ten lines: it echoes the prompt's last token, and says on standard output what is no answer.
ECHO = """
import os, sys
from tools.peers import face
print("a library's greeting")
def run(requests, log, start_s, realtime):
  print("a library's news")
  for request in requests:
    if request["prompt"] == [13]:
      raise SystemExit("thirteen is not served")
    log.sent(request["id"])
    for _ in range(request["output_len"]):
      log.got(request["id"], [request["prompt"][-1]])
face.serve(lambda: face.Peer({"pid": os.getpid()}, run, lambda prompt, tokens: [0.5 * t for t in tokens]))
"""


def test_equal_tokens_need_no_judge():
  found = agreement.compare({1: [5, 6], "b": [7]}, {1: (5, 6), "b": (7,)})
  assert (found.identical, found.differing, found.agreeing_prefix) == (2, (), 1.0)
  assert found.judged({})["same_tokens"] is True


def test_a_difference_is_allowed_at_ties_only():
  found = agreement.compare({1: [5, 6, 7], 2: [1, 2, 3, 4], 3: [9]}, {1: [5, 6, 7], 2: [1, 0, 3, 4], 3: [9]})
  assert found.differing == (2,)
  assert found.agreeing_prefix == pytest.approx((3 + 1 + 1) / 8)
  assert found.beside_sluice() == {"requests": 3, "first_tokens": 3, "agreeing_tokens": 5, "tokens": 8}
  assert found.judged({})["same_tokens"] is None
  tie = found.judged({2: [0.0, agreement.TIE, 0.0, 0.0]})
  assert (tie["same_tokens"], tie["beyond_ties"], tie["worst_margin"]) == (True, 0, agreement.TIE)
  wrong = found.judged({2: [0.0, 2 * agreement.TIE, 0.0, 1.5]})
  assert (wrong["same_tokens"], wrong["beyond_ties"], wrong["worst_margin"]) == (False, 2, 1.5)
  assert found.judged({2: [0.0, float("nan"), 0.0, 0.0]})["same_tokens"] is False


def test_a_lower_precision_is_measured_by_what_f32_would_choose():
  found = agreement.count_choices([[0.0, agreement.TIE, 0.5], [1.5]])
  assert (found["f32_choices"], found["mean_margin"]) == (0.5, pytest.approx((agreement.TIE + 2.0) / 4, abs=1e-5))
  assert report.verdict(found) == "50.0% as f32, 5.0e-01 below"
  assert report.verdict(agreement.count_choices([])) == "not judged"


def test_a_lower_precision_is_also_compared_with_sluice():
  found = agreement.compare({1: [5, 6, 7], 2: [1, 2], 3: [9]}, {1: [5, 6, 8], 2: [3, 2], 3: [9]})
  beside = {"beside_sluice": found.beside_sluice()}
  words = "2 of 3 first ones as Sluice's, 3 of 6 before another"
  assert report.verdict(agreement.count_choices([]) | beside) == f"not judged; {words}"
  assert report.verdict(agreement.count_choices([[0.0]]) | beside) == f"100.0% as f32, 0.0e+00 below; {words}"


@pytest.mark.parametrize(("unjudged", "share"), [(False, 0.5), (True, None)])
def test_the_judge_reads_tokens_unless_it_is_left_out(tmp_path, monkeypatch, unjudged, share):
  class StandInJudge:
    """It prefers even tokens."""

    def order(self, value, timeout_s):
      rows = map(json.loads, pathlib.Path(value["judge"]).read_text("utf-8").splitlines())
      lines = [{"id": row["id"], "margins": [float(token % 2) for token in row["tokens"]]} for row in rows]
      pathlib.Path(value["output"]).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")

    def close(self):
      pass

  monkeypatch.setattr(peers, "start", lambda *_: StandInJudge())
  tokens = {"sluice": (2, 3), "openvino": (2, 5)}
  outcomes = {name: [Outcome("a", 2, 0.0, 0.0, (), these)] for name, these in tokens.items()}
  args = types.SimpleNamespace(precision="int8", unjudged=unjudged)
  found = peers.judged(outcomes, [WorkRequest("a", 0.0, (1,), 2)], tmp_path, args)
  assert found["sluice"] == {"f32_choices": share, "mean_margin": share}
  assert found["openvino"]["f32_choices"] == share
  assert found["openvino"]["beside_sluice"]["agreeing_tokens"] == 1


@pytest.mark.parametrize("tokens", [{1: [5]}, {1: [5, 6, 7]}, {}])
def test_outputs_of_another_length_are_not_comparable(tokens):
  with pytest.raises(ConfigError, match="request 1"):
    agreement.compare({1: [5, 6]}, tokens)


def echo_peer(tmp_path: pathlib.Path, script: str = ECHO, timeout_s: float = 60.0) -> PeerProcess:
  return PeerProcess("echo", [sys.executable, "-c", script], tmp_path / "echo.log", timeout_s)


def state(pid: int) -> str:
  return pathlib.Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()[0]


def write_file(path: pathlib.Path, *requests: WorkRequest) -> pathlib.Path:
  with open(path, "w", encoding="utf-8") as file:
    write_requests(file, requests, {"made": "here"})
  return path


def test_a_child_serves_files_and_stands_still_between(tmp_path):
  requests = write_file(tmp_path / "r.jsonl", WorkRequest("a", 0.5, (1, 2), 3), WorkRequest(7, 0.0, (4,), 1))
  child = echo_peer(tmp_path)
  try:
    pid = child.about["settings"]["pid"]
    for realtime in (False, True):
      outcomes = {
        outcome.id: outcome for outcome in child.serve(requests, tmp_path / "o", realtime=realtime, timeout_s=60)
      }
      assert {key: outcome.tokens for key, outcome in outcomes.items()} == {"a": (2, 2, 2), 7: (4,)}
      assert all(outcome.ok for outcome in outcomes.values())
      assert outcomes["a"].intended_s - outcomes[7].intended_s == pytest.approx(0.5 if realtime else 0.0)
      while state(pid) != "T":  # the signal is on its way
        time.sleep(0.01)
    (tmp_path / "asked").write_text('{"id": 1, "prompt": [1], "tokens": [2, 3]}\n', "utf-8")
    child.order({"judge": str(tmp_path / "asked"), "output": str(tmp_path / "margins")}, 60)
    assert json.loads((tmp_path / "margins").read_text("utf-8")) == {"id": 1, "margins": [1.0, 1.5]}
  finally:
    child.close()
  assert not pathlib.Path(f"/proc/{pid}").exists()
  child.close()
  assert "news" in (tmp_path / "echo.log").read_text("utf-8")


def test_a_child_that_fails_is_told_with_its_last_words(tmp_path):
  with pytest.raises(ConfigError, match=r"echo ended with exit code 3: .*no such luck"):
    echo_peer(tmp_path, "import sys; print('no such luck', file=sys.stderr); sys.exit(3)")
  with pytest.raises(ConfigError, match="did not answer within 0.2 s"):
    echo_peer(tmp_path, "import time; time.sleep(60)", 0.2)
  child = echo_peer(tmp_path)
  requests = write_file(tmp_path / "r.jsonl", WorkRequest(1, 0.0, (13,), 1))
  try:
    with pytest.raises(ConfigError, match="thirteen is not served"):
      child.serve(requests, tmp_path / "o", realtime=False, timeout_s=60)
  finally:
    child.close()


def test_too_few_tokens_are_a_failed_request(tmp_path):
  row = {"id": 1, "output_len": 2, "intended_s": 0.0, "sent_s": 0.0, "chunks": [[1.0, 1]], "tokens": [5]}
  (tmp_path / "o").write_text(json.dumps(row) + "\n", "utf-8")
  (outcome,) = read_outcomes(tmp_path / "o")
  assert not outcome.ok
  with pytest.raises(ConfigError, match="1 of 4 requests"):
    report.figures([{"failed": 1, "requests": 4}], online=False)


def test_requests_fall_due_at_their_times():
  waiting = [{"arrival_s": 1e6}, {"arrival_s": 0.0}]
  assert face.due(waiting, time.monotonic(), True, 0) == []
  assert face.due(waiting, time.monotonic(), True, 2) == [{"arrival_s": 0.0}]
  assert face.due(waiting, time.monotonic(), True, 2) == []
  assert face.due(waiting, time.monotonic(), False, 2) == [{"arrival_s": 1e6}]


class StandInPipeline:
  """OpenVINO GenAI's pipeline with a token a step for each request, however many there are."""

  def __init__(self):
    self.running: list[StandInHandle] = []
    self.most = 0  # requests at once

  def add_request(self, _number, _prompt, config):
    handle = StandInHandle(config.max_new_tokens)
    self.running.append(handle)
    return handle

  def has_non_finished_requests(self):
    return bool(self.running)

  def step(self):
    self.most = max(self.most, len(self.running))
    for handle in self.running:
      handle.step()
    self.running = [handle for handle in self.running if handle.left]


class StandInHandle:
  """Of a request with `left` tokens to come."""

  def __init__(self, left):
    self.left, self._ready = left, []

  def step(self):
    self.left -= 1
    self._ready.append(7)

  def can_read(self):
    return bool(self._ready)

  def read(self):
    found, self._ready = self._ready, []
    return {0: types.SimpleNamespace(generated_ids=found)}


def test_openvino_gets_no_more_requests_at_once_than_allowed(tmp_path, monkeypatch):
  pipeline = StandInPipeline()
  names = {
    "SchedulerConfig": types.SimpleNamespace,
    "GenerationConfig": lambda: types.SimpleNamespace(set_eos_token_id=lambda _: None),
    "ContinuousBatchingPipeline": lambda *_: pipeline,
  }
  monkeypatch.setitem(sys.modules, "openvino", types.SimpleNamespace(Tensor=list))
  monkeypatch.setitem(sys.modules, "openvino_genai", types.SimpleNamespace(**names))
  monkeypatch.setattr(run_openvino, "convert", lambda *_: "")
  monkeypatch.setattr(sys, "argv", ["run_openvino", "--model=m", "--work=w", "--max_requests=2"])
  peers: list[face.Peer] = []
  monkeypatch.setattr(face, "serve", lambda begin: peers.append(begin()))
  run_openvino.main()
  requests = [{"id": number, "arrival_s": 0.0, "prompt": [1], "output_len": 1 + number} for number in range(5)]
  log = face.Log(requests, time.monotonic(), False)
  assert peers[0].run is not None
  peers[0].run(requests, log, time.monotonic(), False)
  log.write(tmp_path / "o")
  assert [len(outcome.tokens) for outcome in read_outcomes(tmp_path / "o")] == [1, 2, 3, 4, 5]
  assert pipeline.most == 2


def test_a_missing_kernel_is_reported_before_rounds_begin(tmp_path, monkeypatch, capsys):
  reason = "the packed matmul is not built"
  about = {"settings": {"fallbacks": [reason]}}
  monkeypatch.setattr(peers, "PeerProcess", lambda *_: types.SimpleNamespace(about=about))
  args = types.SimpleNamespace(threads=2, max_requests=64, precision="int8", online=False, flag=[])
  assert peers.start("sluice", tmp_path, args).about == about
  assert f"sluice is slower than it can be: {reason}" in capsys.readouterr().err


def rotated(x: np.ndarray, position: float, pairs: list[tuple[int, int]]) -> np.ndarray:
  """Rotary embedding over the given pairs of a head."""
  out = x.copy()
  for number, (low, high) in enumerate(pairs):
    angle = position / 10_000 ** (number / len(pairs))
    out[low] = x[low] * np.cos(angle) - x[high] * np.sin(angle)
    out[high] = x[high] * np.cos(angle) + x[low] * np.sin(angle)
  return out


def test_projections_are_put_in_llama_cpps_order():
  rng = np.random.default_rng(0)
  query, key, x = rng.normal(size=(2 * 8, 5)), rng.normal(size=(2 * 8, 5)), rng.normal(size=5)
  halves, neighbours = [(i, i + 4) for i in range(4)], [(2 * i, 2 * i + 1) for i in range(4)]
  for head in range(2):
    rows = slice(8 * head, 8 * head + 8)
    scores = []
    for pairs, order in ((halves, lambda w: w), (neighbours, lambda w: write_gguf.interleaved(w, 2))):
      q, k = rotated(order(query)[rows] @ x, 9.0, pairs), rotated(order(key)[rows] @ x, 4.0, pairs)
      scores.append(q @ k)
    assert scores[0] == pytest.approx(scores[1])


def test_every_tensor_of_a_checkpoint_has_a_name_in_gguf():
  assert write_gguf.gguf_name("model.layers.11.self_attn.q_proj.weight") == "blk.11.attn_q.weight"
  assert write_gguf.gguf_name("model.embed_tokens.weight") == "token_embd.weight"
  assert write_gguf.gguf_name("lm_head.weight") == "output.weight"
  with pytest.raises(KeyError):
    write_gguf.gguf_name("model.layers.0.self_attn.q_norm.weight")


def a_run(shape: str, rate: float, **agreed) -> dict:
  same = {"differing_requests": [], "same_tokens": True, "worst_margin": 0.0, "beyond_ties": 0} | agreed
  sides = {"sluice": 300.0, "vllm": rate}
  engines = {
    name: {"figures": {"output_tok_s": value}, "agreement": same, "ready_s": 5.0} for name, value in sides.items()
  }
  report.add_ratios(engines, online=False)
  return {"shape": shape, "mode": "offline", "engines": engines, "left_out": {"openvino": "it is not set up"}}


def test_the_report_has_ratios_verdicts_and_who_is_missing():
  differs = {"differing_requests": [4], "same_tokens": False, "worst_margin": 0.02, "beyond_ties": 3}
  text = report.table(a_run("llama-15m", 200.0, **differs))
  assert "| vllm | 200.0 | 1.50 | 5.0 | 1 differ, 3 tokens beyond ties (worst 2e-02) |" in text
  assert "left out: openvino: it is not set up" in text
  assert report.verdict(differs | {"same_tokens": True}) == "1 differ, at ties (2e-02)"
  assert report.verdict(differs | {"same_tokens": None}) == "1 differ, not judged"


def test_less_time_is_a_ratio_above_one_and_the_best_peer_has_a_row():
  agreed = {"differing_requests": []}
  sides = {"sluice": 2.0, "vllm": 3.0, "openvino": 1.0}
  engines = {
    name: {
      "figures": {"output_tok_s": 90.0} | dict.fromkeys(report.LATENCIES, value),
      "agreement": agreed,
      "ready_s": 5.0,
    }
    for name, value in sides.items()
  }
  engines["vllm"]["figures"]["itl_p99_ms"] = 0.5
  report.add_ratios(engines, online=True)
  assert engines["openvino"]["peer_over_sluice"] == dict.fromkeys(report.LATENCIES, 0.5)
  assert engines["vllm"]["peer_over_sluice"] == dict.fromkeys(report.LATENCIES, 1.5) | {"itl_p99_ms": 0.25}
  run = {"mode": "online", "engines": engines, "workload": {"rate": 3.4}, "left_out": {}}
  lines = report.table(run).splitlines()
  assert lines[-2] == "| best peer over sluice |  | 0.50 | 0.50 | 0.50 | 0.25 |  |  |"
  assert lines[-1] == "offered: 3.40 requests/s"


def test_a_run_replaces_its_like_in_the_file(tmp_path):
  path = tmp_path / "peers.json"
  for shape, rate in (("llama-15m", 200.0), ("llama-125m", 100.0), ("llama-15m", 250.0)):
    report.keep(str(path), a_run(shape, rate))
  runs = json.loads(path.read_text("utf-8"))["runs"]
  assert [(run["shape"], run["engines"]["vllm"]["figures"]["output_tok_s"]) for run in runs] == [
    ("llama-125m", 100.0),
    ("llama-15m", 250.0),
  ]


def test_runs_of_other_sizes_or_flags_stay_in_the_file(tmp_path):
  path = tmp_path / "peers.json"
  one = a_run("llama-15m", 200.0) | {"workload": {"num_requests": 64, "max_requests": 64}, "flags": []}
  few = one | {"workload": {"num_requests": 64, "max_requests": 8}}
  other = few | {"flags": ["llama_cpp:--type=Q4_K_M"]}
  for run in (one, few, other, few):
    report.keep(str(path), run)
  assert json.loads(path.read_text("utf-8"))["runs"] == [one, other, few]


def test_a_shape_that_peers_cannot_take_is_one_line(tmp_path):
  for shape, words in (("llama-9", "is unknown"), ("qwen3-0.6b", "is not a Llama")):
    done = run_module("tools.peers", f"--shape={shape}", f"--work={tmp_path}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert words in done.stderr
  assert "peers are" in run_module("tools.peers", "--only=ollama", f"--work={tmp_path}").stderr
