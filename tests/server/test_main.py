"""The server as a process: flags, signals, exit codes, and a real (random) model behind the socket."""

from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import IO

from absl.testing import flagsaver
import pytest

from engine.config import EngineConfig
from engine.settings import DeviceSettings
from server import flags, main
from server.client import Client, SluiceError
from server.errors import NotConfigured, Starting
from tests.commands import run_module
from tests.server.harness import CHILDREN
from tools.demo_model.skills import SKILLS, is_correct, make_instances
from tools.make_random_model import write_model

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "models" / "demo"
RAW = {
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "vocab_size": 400,
  "hidden_size": 32,
  "intermediate_size": 64,
  "num_hidden_layers": 1,
  "num_attention_heads": 2,
  "num_key_value_heads": 1,
  "head_dim": 16,
  "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-5,
  "rope_theta": 10000.0,
  "tie_word_embeddings": True,
  "hidden_act": "silu",
  "bos_token_id": 1,
  "eos_token_id": 2,
  "a_new_number": 0.5,
}
LABELS = ("device  ", "model  ", "KV  ", "programs  ", "ready  ", "open  ")
SMALL = ("--token_budgets=8", "--max_num_seqs=4", "--prefill_chunk=8", "--kv_cache_mb=4", "--compile_cache_dir=")


@pytest.fixture(scope="module")
def model(tokenizer_dir, tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("model") / "tiny"
  write_model(folder, RAW, seed=1)
  for path in tokenizer_dir.iterdir():
    shutil.copy(path, folder)
  return folder


def start(*arguments: str, stderr: IO | int = subprocess.PIPE, module: str = "server.main") -> subprocess.Popen:
  process = subprocess.Popen(
    [sys.executable, "-m", module, *arguments],
    cwd=ROOT,
    stderr=stderr,
    text=True,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  CHILDREN.append(process)
  return process


def wait_for_file(path: pathlib.Path, process: subprocess.Popen, stale: str = "") -> str:
  """The text of a file that a process is about to write, or to remove and write where it is `stale`."""
  for _ in range(4800):
    with contextlib.suppress(FileNotFoundError):
      if (text := path.read_text()) != stale:
        return text
    assert process.poll() is None, process.communicate()[1]
    time.sleep(0.05)
  raise AssertionError(f"{path} never came")


@pytest.mark.catalogue("A6")
def test_a_life(model, tmp_path):
  port_file, trace, flagfile = tmp_path / "port", tmp_path / "trace.jsonl", tmp_path / "flags"
  port_file.write_text("stale")
  flagfile.write_text("\n".join((*SMALL, "--served_model_name=named", "--notrace_at_start", "--verbose")))
  process = start(
    f"--model={model}", "--port=0", f"--port_file={port_file}", f"--flagfile={flagfile}", f"--trace_file={trace}"
  )
  port = wait_for_file(port_file, process, stale="stale").strip()
  with Client(f"127.0.0.1:{port}") as client:
    assert client.model_info().model == "named"
    whole = client.generate([{"role": "user", "content": "the cat"}], temperature=0.0, max_tokens=50, ignore_eos=True)
    assert len(whole.token_ids) == 50
    again = client.generate([{"role": "user", "content": "the cat"}], temperature=0.0, max_tokens=50, ignore_eos=True)
    assert again.token_ids == whole.token_ids
    assert not trace.exists()
    process.send_signal(signal.SIGUSR1)
    wait_for_file(trace, process)
    client.generate("the", max_tokens=5, ignore_eos=True)
    process.send_signal(signal.SIGUSR1)
    # A second server on the port says so in one line; this one does not mind.
    second = start(f"--model={model}", f"--port={port}", *SMALL)
    said = second.communicate(timeout=180)[1]
    assert second.returncode == 1
    assert said.splitlines()[-1] == (
      f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host"
    )
    assert client.load().compiles_after_ready == 0
    with client.stream("the", max_tokens=2000, ignore_eos=True) as stream:
      pieces = iter(stream)
      tokens = len(next(pieces).token_ids)
      process.send_signal(signal.SIGTERM)
      rest = list(pieces)
    assert tokens + sum(len(piece.token_ids) for piece in rest) == 2000 and rest[-1].ending is not None
  said = process.communicate(timeout=180)[1]
  assert process.returncode == 0, said
  assert said.count("configuration:") == 1 and "--served_model_name=named" in said and "--token_budgets=8\n" in said
  labels = [line.split()[0] for line in said.splitlines() if line.startswith(LABELS)]
  assert labels == [label.strip() for label in LABELS]
  assert " blocks of 16 = " in said and "for steps of 8 tokens; all compiled at every start" in said
  assert f"\nready on 127.0.0.1:{port}\n" in said and "\ncompile: 0 of" in said
  assert said.count("warning: config.json keys that Sluice does not know: a_new_number; it does not read them") == 1
  assert "0 KV blocks in use" in said and said.endswith("stopped, exit code 0\n")
  assert "Traceback" not in said
  events = [json.loads(line)["event"] for line in trace.read_text().splitlines()]
  assert events[0] == "state" and events.count("commit") >= 5


@pytest.mark.parametrize("processes", [0, 1])
def test_a_broken_chat_template_is_told_at_start_and_in_chats(model, tmp_path, processes):
  """Everything else is served."""
  folder = shutil.copytree(model, tmp_path / "model")
  (folder / "chat_template.jinja").write_text("{% for %}")
  port_file = tmp_path / "port"
  process = start(
    f"--model={folder}", "--port=0", f"--port_file={port_file}", "--fake_device", f"--frontend_processes={processes}"
  )
  said = "the chat template is not valid jinja2: "
  with Client(f"127.0.0.1:{wait_for_file(port_file, process).strip()}") as client:
    assert len(client.generate("the cat", max_tokens=5, ignore_eos=True).token_ids) == 5
    assert not client.model_info().has_chat_template
    with pytest.raises(SluiceError, match=f"{said}.*; fix it, .*; until then send the prompt as text") as caught:
      client.generate([{"role": "user", "content": "the cat"}], max_tokens=5)
    assert caught.value.reason == "NO_CHAT_TEMPLATE"
  process.send_signal(signal.SIGTERM)
  lines = process.communicate(timeout=180)[1].splitlines()
  assert [line for line in lines if said in line][0].startswith(f"warning: no chats are served: {said}")
  assert sum(said in line for line in lines) == 1


def test_the_demo_model_answers_through_the_socket(tmp_path):
  """Its checked skills, alone and many at once, through chat template, engine and detokenisation."""
  port_file = tmp_path / "port"
  process = start(
    "--port=0",
    f"--port_file={port_file}",
    "--token_budgets=16,256",
    "--max_num_seqs=16",
    "--prefill_chunk=256",
    "--compile_cache_dir=",
  )
  with Client(f"127.0.0.1:{wait_for_file(port_file, process).strip()}") as client:
    instances = [instance for skill in SKILLS for instance in make_instances(skill, 4, seed=11)]

    def answer(instance) -> str:
      return client.generate(instance.messages, temperature=0.0, max_tokens=200).text

    with ThreadPoolExecutor(16) as pool:
      together = list(pool.map(answer, instances))
    assert sum(map(is_correct, instances, together)) >= len(instances) - 2, together
    assert [answer(instance) for instance in instances[::4]] == together[::4]
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=180)
  assert process.returncode == 0


@pytest.mark.catalogue("A7", "A8")
def test_while_starting(model):
  """Clients are told, and a signal is obeyed."""
  process = start(f"--model={model}", "--port=0", "--verbose", *SMALL)
  assert process.stderr is not None
  address = next(line.split()[2].rstrip(",") for line in process.stderr if line.startswith("listening on"))
  with Client(address) as client:
    with pytest.raises(SluiceError) as caught:
      client.generate("the")
    assert caught.value.reason == "STARTING"
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=180)[1]
  assert process.returncode == 0 and said.endswith("stopped while starting\n"), said


BAD_STARTS = {
  ("--nonsense=1",): (2, "error: Unknown command line flag 'nonsense'; --help lists the flags"),
  ("--port=abc",): (2, "error: flag --port=abc: invalid literal"),
  ("--port=70000",): (2, "error: port=70000 must be at least 0 and at most 65535; set --port"),
  ("--block_size=-1",): (2, "error: block_size=-1 must be at least 0; set --block_size"),
  ("--queue_timeout_s=-1",): (2, "error: queue_timeout_s=-1.0 must be at least 0; set --queue_timeout_s"),
  ("--policy=random",): (2, "error: policy='random' must be one of fair, fcfs, "),
  ("--prefix_cache_scope=everybody",): (2, "error: prefix_cache_scope='everybody' must be one of global, "),
  ("--max_queued_share_per_tenant=0",): (2, "error: max_queued_share_per_tenant=0.0 must be at least 0.001 "),
  ("--max_queued_share_per_tenant=1.5",): (
    2,
    "error: max_queued_share_per_tenant=1.5 must be at least 0.001 and at most 1; ",
  ),
  ("--max_resident_mb=-1",): (2, "error: max_resident_mb=-1 must be at least 0; "),
  ("--metrics_port=-2",): (2, "error: metrics_port=-2 must be at least -1 "),
  ("--flagfile=/does/not/exist",): (2, "error: Unable to open flagfile"),
  ("positional",): (1, "error: positional: no such folder; --model takes a model folder, ORG/NAME of the"),
  ("--model=GOOD", "positional"): (2, "error: unexpected argument 'positional'"),
  ("--port=0", "--gpu-memory-utilization=0.9"): (2, "error: --gpu-memory-utilization is a flag of vLLM that Sluice"),
  ("--port=0", "--chat_template=/does/not/exist"): (1, "error: chat_template=/does/not/exist cannot be read"),
  ("--port=0", "--token_budgets=8,x"): (2, "error: token_budgets=8,x must be whole numbers"),
  ("--port=0", "--token_budgets=64,8", "--prefill_chunk=8"): (2, "error: token budgets (64, 8) must be strictly"),
  ("--port=0", "--num_blocks=8", "--kv_cache_mb=8"): (2, "error: kv_cache_mb=8 and num_blocks=8 both size the KV"),
  ("--port=0", "--model=/does/not/exist"): (1, "error: /does/not/exist"),
  ("--port=0", "--model=EMPTY"): (1, "error: "),
  ("--port=0", "--model=CUT", *SMALL): (1, "error: "),
  ("--port=0", "--model=BAD_TOKENIZER", *SMALL): (1, "error: "),
  ("--host=not.a.host.invalid",): (1, "error: cannot listen on not.a.host.invalid"),
  ("--port=0", "--api_key_file=/does/not/exist"): (1, "error: api_key_file=/does/not/exist cannot be read: No such"),
  ("--port=0", "--api_key_file=/dev/null"): (1, "error: api_key_file=/dev/null is not a regular file"),
  ("--port=0", "--tls_cert_file=/does/not/exist"): (1, "error: tls_cert_file='/does/not/exist', tls_key_file='', "),
  ("--port=0", "--tls_cert_file=/dev/null", "--tls_key_file=/dev/null"): (1, "error: tls_key_file=/dev/null has mode"),
  ("--port=0", "--access_log=/does/not/exist"): (1, "error: access_log=/does/not/exist cannot be opened: No such file"),
  ("--port=0", "--admin_port=0", "--admin_host=0.0.0.0"): (
    1,
    "error: admin_host=0.0.0.0 can be reached by others",
  ),
  ("--port=0", "--admin_port=-2"): (2, "error: admin_port=-2 must be at least -1 "),
  ("--port=0", "--port_file=/does/not/exist/port"): (
    1,
    "error: /does/not/exist/port cannot be written; give --port_file",
  ),
  ("--port=0", "--step_timeout_s=0.2"): (1, "error: step_timeout_s=0.2 is below 0.5, within which a healthy engine"),
  ("--port=0", "--watchdog_grace_s=0"): (2, "error: watchdog_grace_s=0.0 must be at least 0.1; "),
  ("--port=0", "--http_port=TAKEN"): (1, "error: cannot listen for HTTP on 127.0.0.1:"),
  ("--port=0", "--admin_port=TAKEN"): (1, "error: cannot listen on 127.0.0.1:"),
  ("--port=TAKEN",): (1, "error: cannot listen on 127.0.0.1:"),
  ("--port=0", "--compile_cache_dir=OPEN", "--model=GOOD"): (1, "error: compile_cache_dir="),
  ("--port=0", "--attention=gpu", "--model=GOOD", *SMALL): (
    1,
    "error: attention=gpu cannot run on this machine's device",
  ),
  ("--port=0", "--attention=tpu", "--model=GOOD", *SMALL): (
    1,
    "error: attention=tpu cannot run on this machine's device",
  ),
  ("--port=0", "--max_metadata_bytes=10"): (2, "error: max_metadata_bytes=10 must be at least 1024; "),
}


# Runs all of them in one process, since importing takes far longer than refusing.
_ONE_AFTER_ANOTHER = """
import contextlib, io, json, sys
from absl import flags
from absl.testing import flagsaver
from server import main
outcomes = []
for arguments in json.load(sys.stdin):
  flags.FLAGS.unparse_flags()
  with flagsaver.flagsaver(), contextlib.redirect_stderr(io.StringIO()) as said:
    try:
      code = main._main(main._parse(["server", *arguments]))
    except SystemExit as ended:
      code = ended.code
  outcomes.append((code, said.getvalue()))
json.dump(outcomes, sys.stdout)
"""


@pytest.fixture(scope="module")
def bad_starts(model, tmp_path_factory) -> dict[tuple[str, ...], tuple[int, str]]:
  """Exit code and stderr of each."""
  root = tmp_path_factory.mktemp("bad")
  (root / "EMPTY").mkdir()
  cut = shutil.copytree(model, root / "CUT")
  weights = (cut / "model.safetensors").read_bytes()
  (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
  shutil.copytree(model, root / "GOOD")
  shutil.copytree(model, root / "BAD_TOKENIZER")
  (root / "BAD_TOKENIZER" / "tokenizer.json").write_text("{}")
  (root / "OPEN").mkdir()
  (root / "OPEN").chmod(0o777)
  with socket.create_server(("127.0.0.1", 0)) as taken:

    def placed(argument: str) -> str:
      flag, _, value = argument.partition("=")
      port = taken.getsockname()[1]
      return f"{flag}={port if value == 'TAKEN' else root / value}" if value.isupper() else argument

    process = subprocess.run(
      [sys.executable, "-c", _ONE_AFTER_ANOTHER],
      input=json.dumps([list(map(placed, arguments)) for arguments in BAD_STARTS]),
      cwd=ROOT,
      text=True,
      capture_output=True,
      timeout=300,
      check=False,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
  assert process.returncode == 0, process.stderr
  return dict(zip(BAD_STARTS, json.loads(process.stdout), strict=True))


@pytest.mark.catalogue("A6")
@pytest.mark.parametrize("arguments", BAD_STARTS, ids=" ".join)
def test_bad_start(bad_starts, arguments):
  code, said = bad_starts[arguments]
  wanted_code, wanted = BAD_STARTS[arguments]
  errors = [line for line in said.splitlines() if line.startswith("error: ")]
  assert code == wanted_code, said
  assert len(errors) == 1 and errors[0].startswith(wanted), said
  assert "Traceback" not in said
  # Beside it, only what breaks a long silence, and what the server warns of.
  others = [line for line in said.splitlines() if line not in errors and not line.startswith("warning: ")]
  assert all(re.search(r", \d+ s$", line) for line in others), said


@pytest.mark.catalogue("H8")
@pytest.mark.parametrize(
  "arguments, wanted",
  [
    (("--host=127.0.0.1",), ()),
    (("--host=localhost",), ()),
    (("--host=0.0.0.0",), ("can be read and changed on its way", "anybody may call")),
    (("--host=0.0.0.0", "--api_key_file=keys"), ("can be read and changed on its way",)),
    (("--host=::", "--tls_cert_file=cert"), ("anybody may call",)),
    (("--host=0.0.0.0", "--tls_cert_file=cert", "--api_key_file=keys"), ()),
    (("--host=0.0.0.0", "--tls_cert_file=cert", "--tls_client_ca_file=ca"), ()),
  ],
)
def test_the_warning_says_what_is_missing(arguments, wanted):
  with flagsaver.flagsaver():
    flags.parse_flags(["server", *arguments], "server.main")
    said = flags.describe_exposure()
  assert len(said.splitlines()) == bool(wanted)
  assert [text for text in ("can be read and changed on its way", "anybody may call") if text in said] == list(wanted)


@pytest.mark.parametrize(
  "arguments, rows, note",
  [
    ((), 100, ""),
    ((), 101, "one connection may have 100 calls"),
    (("--max_concurrent_streams=256",), 256, ""),
  ],
)
def test_the_note_on_batches_that_one_connection_cannot_fill(arguments, rows, note):
  with flagsaver.flagsaver():
    flags.parse_flags(["server", *arguments], "server.main")
    said = flags.describe_narrowness(rows)
  assert bool(said) == bool(note) and note in said


def test_the_switch_of_the_step_trace(capfd):
  class Engine:
    def __init__(self):
      self.calls = []

    def start_trace(self, path):
      if path == "/nowhere":
        raise FileNotFoundError(2, "No such file or directory")
      self.calls.append("start")

    def stop_trace(self):
      self.calls.append("stop")

  with pytest.raises(NotConfigured, match="no step trace without --trace_file"):
    main._Trace("").set(True)
  trace = main._Trace("/some/file")
  with pytest.raises(Starting):
    trace.set(True)
  trace.engine = engine = Engine()
  assert [trace.set(on) for on in (True, True, False, False)] == ["/some/file"] * 4
  assert engine.calls == ["start", "stop", "start", "stop"]
  trace.toggle()
  trace.toggle()
  assert engine.calls[4:] == ["start", "stop"]
  broken = main._Trace("/nowhere")
  broken.engine = engine
  with pytest.raises(NotConfigured, match="step trace: /nowhere: No such file or directory"):
    broken.set(True)
  capfd.readouterr()
  broken.toggle()
  assert capfd.readouterr().err == "SIGUSR1: step trace: /nowhere: No such file or directory\n"


def test_a_bad_flag_of_the_real_program():
  process = start("--nonsense=1")
  assert process.communicate(timeout=180)[1] == "error: Unknown command line flag 'nonsense'; --help lists the flags\n"
  assert process.returncode == 2


@pytest.mark.parametrize("module", ["server.main", "tools.bundle", "tools.client"])
@pytest.mark.parametrize("flag", ["--help", "--helpfull"])
def test_help_is_no_failure(module, flag):
  done = run_module(module, flag)
  assert (done.returncode, done.stderr) == (0, "")
  assert module == "tools.client" or "--token_budgets" in done.stdout


def test_the_configuration_is_what_the_build_decided():
  served = EngineConfig(
    vocab_size=100,
    max_model_len=64,
    num_blocks=8,
    token_budgets=(8, 32),
    max_num_seqs=4,
    prefill_chunk=16,
    overlap=False,
  )
  decided = ("--token_budgets=", "--prefill_chunk=", "--max_model_len=", "--block_size=", "--overlap=")
  with flagsaver.flagsaver():
    flags.parse_flags(["server", "--block_size=32", "--max_num_seqs=4"], "server.main")
    before, after = flags.configuration_lines(), flags.configuration_lines(served)
    assert [line for line in before if line.startswith(decided)] == ["--block_size=32"]
    assert {line for line in after if line.startswith(decided)} == {
      "--token_budgets=8,32",
      "--prefill_chunk=16",
      "--max_model_len=64",
      "--block_size=16",
      "--overlap=false",
    }
    assert "--max_num_seqs=4" in after
    flags.parse_flags(["server", *after], "server.main")
    assert flags.setting_values(DeviceSettings)["token_budgets"] == (8, 32)
