"""The engine's figures on a GPU, stage by stage: composes tools that measure, and says what must come out.

A stage is a few commands, each a process with a time limit whose result is a JSON file in the folder, so a stage that
fails or is cut off loses nothing of the others. It may not measure anything itself.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from tools.measure import ROOT
from tools.peers.agreement import compare
from tools.workload import read_tokens

BIG, SMALL = "llama3-8b", "llama3.2-1b"
# Names of XLA's own flags; the first changes nothing and is what the others are compared with.
BUFFERS = {
  "always": "",
  "skip temporaries": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
  "exclusive lock": "--xla_gpu_require_exclusive_lock=true",
  "none": "--xla_gpu_enable_command_buffer=",
}


@dataclasses.dataclass(frozen=True)
class Command:
  """A process that writes its result to a file.

  Attributes:
    name: of the file, without .json.
    words: the command; its result is the last line of its standard output.
    flags: XLA's, added to XLA_FLAGS.
  """

  name: str
  words: tuple[str, ...]
  flags: str = ""


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured; `TINY` is a dry run on a CPU."""

  shapes: tuple[str, str] = (BIG, SMALL)
  batches: tuple[str, str] = ("1,8,32,64", "1,32")
  context: int = 1024
  requests: int = 256
  lengths: str = "100,1024"
  full: str = "1000,1000"
  rows: int = 256
  seconds: float = 2.0
  device: str = "cuda"
  dtype: str = "bfloat16"
  more: tuple[str, ...] = ()


TINY = Sizes(
  shapes=("llama-15m", "llama-15m"),
  batches=("1,2", "1"),
  context=32,
  requests=3,
  lengths="4,9",
  full="8,8",
  rows=8,
  seconds=0.01,
  device="cpu",
  dtype="float32",
  more=(
    "--token_budgets=8",
    "--max_num_seqs=8",
    "--prefill_chunk=8",
    "--num_blocks=64",
    "--max_model_len=128",
    "--prompts=8",
  ),
)


def stages(out: pathlib.Path, sizes: Sizes) -> dict[str, list[Command]]:
  """All stages by name. `out`: an absolute path; programs and a model's weights are kept there too."""
  big, small = sizes.shapes

  def engine(name: str, shape: str, *words: str, cache: str = "programs", flags: str = "") -> Command:
    return Command(
      name,
      (
        *(sys.executable, "-m", "tools.bench_engine", f"--shape={shape}", f"--seconds={sizes.seconds}"),
        *(f"--compile_cache_dir={out / cache}", f"--contexts={sizes.context}", *sizes.more, *words),
      ),
      flags,
    )

  def offline(name: str, lengths: str, *words: str) -> Command:
    rows = f"--max_num_seqs={sizes.rows}"
    return engine(
      name, big, "--parts=offline", "--batches=1", rows, f"--requests={sizes.requests}", f"--lengths={lengths}", *words
    )

  start = ("--parts=decode", f"--batches={sizes.batches[1].split(',')[-1]}")
  twin = [str(out / "twin" / name) for name in ("model", "requests.jsonl")]
  files = f"--model={twin[0]}", f"--requests={twin[1]}"

  def peer(way: str) -> Command:
    words = f"--way={way}", f"--device={sizes.device}", f"--dtype={sizes.dtype}", f"--batch={min(64, sizes.requests)}"
    tokens = f"--output_tokens={out / 'twin' / way}.jsonl"
    return Command(f"twin_{way}", (sys.executable, "-m", "tools.gpu.torch_engine", *files, *words, tokens))

  making = ("-m", "tools.gpu.twin", f"--shape={big}", f"--dtype={sizes.dtype}", f"--out={out / 'twin'}")
  making += f"--requests={sizes.requests}", f"--lengths={sizes.lengths}"
  budgets = [word for word in sizes.more if not word.startswith("--prompts")]
  ours = ("-m", "tools.bench_offline", *files, f"--output_tokens={out / 'twin' / 'sluice.jsonl'}", *budgets)
  ours += f"--max_num_seqs={sizes.rows}", f"--dtype={sizes.dtype}", f"--compile_cache_dir={out / 'programs'}"
  return {
    "start": [engine(f"start_{name}", big, *start, cache="programs_of_start") for name in ("cold", "cached")],
    "decode": [
      engine("decode_8b", big, "--parts=decode,sampler", f"--batches={sizes.batches[0]}"),
      engine("decode_1b", small, "--parts=decode,sampler", f"--batches={sizes.batches[1]}"),
    ],
    "offline": [offline("offline", sizes.lengths), offline("offline_plain", sizes.lengths, "--overlap=false")],
    "full": [offline("full", sizes.full)],
    "buffers": [engine(f"buffers_{name}", big, *start, flags=flags) for name, flags in BUFFERS.items()],
    "twin": [
      Command("twin_made", (sys.executable, *making)),
      Command("twin_sluice", (sys.executable, *ours)),
      peer("batching"),
      peer("static"),
    ],
  }


STAGES = tuple(stages(pathlib.Path("/"), TINY))


def run(command: Command, out: pathlib.Path, deadline: float, log: Any) -> dict[str, Any]:
  """Runs a command until `deadline` (time.monotonic()) and keeps what it says; {"error": ...} where it failed."""
  environment = dict(os.environ)
  if command.flags:
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {command.flags}".strip()
  started = time.monotonic()
  process = subprocess.Popen(
    command.words,
    cwd=ROOT,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=log,
    text=True,
    start_new_session=True,
  )
  found: dict[str, Any]
  try:
    said, _ = process.communicate(timeout=max(0.0, deadline - started))
    found = json.loads(said.strip().splitlines()[-1]) if not process.returncode else {"error": process.returncode}
  except subprocess.TimeoutExpired:
    found = {"error": "out of time"}
  except (ValueError, IndexError):
    found = {"error": "said nothing that is understood"}
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)  # a session of its own: whatever it started ends too
      process.communicate()
  found["took_s"] = round(time.monotonic() - started, 1)
  (out / f"{command.name.replace(' ', '_')}.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
  return found


def measure(
  names: Sequence[str], out: pathlib.Path, sizes: Sizes, deadline: float, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
  """Runs stages in their order; returns what each command said, by its name. Goes on after a failure."""
  out = out.absolute()
  results: dict[str, dict[str, Any]] = {}
  with open(out / "engine_log.txt", "w", encoding="utf-8") as log:
    for stage, commands in stages(out, sizes).items():
      if stage not in names:
        continue
      for command in commands:
        results[command.name] = found = run(command, out, deadline, log)
        say(f"{command.name}: {found.get('error', 'done')}, {found['took_s']} s")
        if "error" in found and command.name in ("twin_made", "twin_sluice"):
          break  # what follows needs it
        if "error" not in found and command.name in ("twin_batching", "twin_static"):
          tokens = (read_tokens(str(out / "twin" / f"{name}.jsonl")) for name in ("sluice", command.name[5:]))
          found["agreeing_prefix"] = compare(*tokens).agreeing_prefix
  return results


# --- the table --------------------------------------------------------------------------------------------------------


def _line(what: str, value: float | None, form: str, target: str, met: bool | None) -> str:
  shown = "-" if value is None else format(value, form)
  verdict = "" if met is None or value is None else "+" if met else "no"
  return f"{what:54s} {shown:>9s}  {target:>16s} {verdict}".rstrip()


def serial_roofline(result: Mapping[str, Any]) -> float:
  """Output tokens a second if keys and values, the matmuls of outputs and those of prompts ran one after the other.

  As Sluice's goals are stated: memory holds the weights read for so many rows that their bytes hide behind the matmuls.
  """
  work, ceilings, (_, length) = result["work"], result["ceilings"], result["offline"]["lengths"]
  keys = 1.5 * length  # of an output token, on average: the prompt and half of the outputs
  seconds = work["kv_bytes"] * keys / ceilings["bytes_s"]
  seconds += (work["token_flops"] + work["head_flops"]) / ceilings["flops_s"]
  return 1.0 / (seconds + work["token_flops"] / ceilings["flops_s"])


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """A line for each figure, with its target where there is one. Reads what `measure` returned; nothing else."""
  good = {name: found for name, found in results.items() if "error" not in found}
  lines = [f"failed: {name}: {found['error']}" for name, found in results.items() if "error" in found]
  limits = {("decode_8b", rows): 1.35 for rows in (1, 8, 32, 64)} | {("decode_1b", 1): 2.0, ("decode_1b", 32): 1.6}
  for name in ("decode_8b", "decode_1b"):
    for row in good.get(name, {}).get("decode", []):
      limit = limits.get((name, row["batch"]))
      what, over = f"{name}: {row['batch']} x {row['context']}, over roofline", row["over_roofline"]
      lines.append(_line(what, over, ".2f", f"<= {limit}" if limit else "", over <= limit if limit else None))
    for row in good.get(name, {}).get("sampler", []):
      what = f"{name}: sampler, {row['batch']} rows, {row['asked']}, of a step"
      lines.append(_line(what, row["of_step"], ".1%", "<= 8%", (row["of_step"] or 0.0) <= 0.08))
  for name in ("offline", "full"):
    if name in good:
      row = good[name]["offline"]
      lines.append(_line(f"{name}: output tokens a second", row["output_tok_s"], ".0f", "", None))
      idle = row["device_idle_share"]
      lines.append(_line(f"{name}: device idle", idle, ".1%", "<= 3%", idle <= 0.03))
  if "full" in good:
    share = good["full"]["offline"]["output_tok_s"] / serial_roofline(good["full"])
    lines.append(_line("full: of the serial roofline", share, ".2f", ">= 0.55", share >= 0.55))
  if {"offline", "offline_plain"} <= good.keys():
    gain = good["offline"]["offline"]["output_tok_s"] / good["offline_plain"]["offline"]["output_tok_s"]
    lines.append(_line("offline: overlap over no overlap", gain, ".2f", "", None))
  for name, limit in (("start_cold", 60), ("start_cached", 10)):
    if name in good:
      # Random weights are drawn on the device: what loading a checkpoint takes is no part of it.
      took = good[name]["warmup_s"]
      lines.append(_line(f"{name}: all rungs ready, s after the weights", took, ".1f", f"<= {limit}", took <= limit))
  for name in BUFFERS:
    for row in good.get(f"buffers_{name}", {}).get("decode", []):
      lines.append(_line(f"command buffers, {name}: ms a step", 1e3 * row["step_s"], ".3f", "", None))
  return lines + _twin_lines(good)


def _twin_lines(good: Mapping[str, Mapping[str, Any]]) -> list[str]:
  lines = []
  ours = good.get("twin_sluice", {}).get("output_tok_s")
  for way, limit in (("batching", 5.0), ("static", 1.5)):
    found = good.get(f"twin_{way}")
    if ours and found:
      same = found.get("agreeing_prefix")
      lines.append(_line(f"twin {way}: tokens before a first difference", same, ".1%", "", None))
      ratio = ours / found["output_tok_s"]
      lines.append(_line(f"twin {way}: ours over its tokens a second", ratio, ".2f", f">= {limit}", ratio >= limit))
  return lines
