"""Measures the engine on a GPU, stage by stage: composes measuring tools, and states the targets.

A stage is a few commands, the most important first, each a process with a time limit. engine.json has their results
after each command. A killed command leaves its results so far, so it costs only itself. Large files (programs, weights)
go into another folder. This module measures nothing itself.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from engine.errors import ConfigError
from tools.gpu.protocol import ENDING_S, last_words, name_exit
from tools.measure import ROOT
from tools.peers.agreement import compare
from tools.workload import read_tokens

BIG, SMALL = "llama3-8b", "llama3.2-1b"
# XLA's flags by name; the first changes nothing and is the baseline of the others.
_PROFILED = "skip profiled"
BUFFERS = {
  "always": "",
  _PROFILED: "--xla_gpu_command_buffer_update_mode=SKIP_PROFILED",
  "skip temporaries": "--xla_gpu_command_buffer_update_mode=SKIP_TEMP",
  "exclusive lock": "--xla_gpu_require_exclusive_lock=true",
  "none": "--xla_gpu_enable_command_buffer=",
}
_CARD_SHARE = 0.95  # of the memory, as the engine takes it
_BIG_BYTES = 16_100_000_000  # weights of `BIG`
_OTHER_BYTES = 5 * 2**30  # activations and XLA's temporaries
_BLOCK_BYTES, _BLOCKS_STEP, _MOST_BLOCKS = 2**23, 256, 8192  # of `BIG`, 64 tokens a block
_POOL_BLOCKS = 1100  # of the other stages: 64 rows of 1,024
_FEW_RUNGS = "8,16,32,64,128,256,384,512"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # never wait for an unreachable hub


@dataclasses.dataclass(frozen=True)
class Command:
  """A process that writes its result to a file.

  Attributes:
    name: name of its result.
    words: the command; its result is the last line of its standard output.
    limit_s: seconds after which it is killed.
    flags: XLA flags, added to XLA_FLAGS.
    kept: file with its results so far, if it writes one.
    fresh: folder to remove first.
  """

  name: str
  words: tuple[str, ...]
  limit_s: float
  flags: str = ""
  kept: pathlib.Path | None = None
  fresh: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The sizes to measure; `TINY` is a dry run on a CPU.

  Attributes:
    shapes, batches: the decode steps'; all other stages use the first shape.
    context: context of the decode steps.
    requests, lengths, full, rows: offline: requests, shortest and longest prompt and output, those of full load, slots.
    budgets, chunk, blocks: ladder and pool of the offline stages; the pool must not depend on free memory, or each of
      them might compile anew.
    engine, pool: flags of every engine; of all but the offline ones.
    prefill: prompts that fill a rung.
    some: requests with --deterministic and without.
  """

  shapes: tuple[str, str] = (BIG, SMALL)
  batches: tuple[str, str] = ("1,8,32,64", "1,32")
  context: int = 1024
  requests: int = 256
  lengths: str = "100,1024"
  full: str = "1000,1000"
  rows: int = 256
  budgets: str = "32,64,128,256,384,512,1024"
  chunk: int = 512
  prefill: str = "128,512"
  some: int = 64
  blocks: int | None = _MOST_BLOCKS  # blocks of 64 tokens: 256 rows of 2,048, 64 GiB
  seconds: float = 1.0
  device: str = "cuda"
  dtype: str = "bfloat16"
  engine: tuple[str, ...] = ("--max_model_len=2048",)  # a model may have 131,072, and a row's table as many blocks
  # 64 rows of 1,024, and fewer rungs than a GPU's own ladder, whose programs take minutes to compile.
  pool: tuple[str, ...] = (
    f"--num_blocks={_POOL_BLOCKS}",
    "--block_size=64",
    f"--token_budgets={_FEW_RUNGS}",
    "--max_num_seqs=64",
  )


def fit_blocks(card_bytes: int | None) -> int | None:
  """Returns the blocks of the offline stages' pool for a card's memory, at most 64 GiB.

  Depends on the card alone, so that all stages share their compiled programs.

  Args:
    card_bytes: the card's memory; None if it is unknown, and then the engine chooses the pool.

  Raises:
    ConfigError: the card does not hold the weights of the largest shape.
  """
  if card_bytes is None:
    return None
  left = int(_CARD_SHARE * card_bytes) - _BIG_BYTES - _OTHER_BYTES
  blocks = min(_MOST_BLOCKS, left // _BLOCK_BYTES // _BLOCKS_STEP * _BLOCKS_STEP)
  if blocks < _POOL_BLOCKS:
    raise ConfigError(
      f"a card of {card_bytes / 2**30:.0f} GiB is too small for the engine's stages: {BIG} in bfloat16 and its KV need "
      f"{(_BIG_BYTES + _OTHER_BYTES + _POOL_BLOCKS * _BLOCK_BYTES) / _CARD_SHARE / 2**30:.0f} GiB; run the stages of "
      "the kernels"
    )
  return blocks


TINY = Sizes(
  shapes=("llama-15m", "llama-15m"),
  batches=("1,2", "1"),
  context=32,
  requests=3,
  lengths="4,9",
  full="8,8",
  rows=8,
  budgets="8",
  chunk=8,
  blocks=64,
  prefill="8",
  some=2,
  seconds=0.01,
  device="cpu",
  dtype="float32",
  engine=("--max_model_len=128",),
  pool=("--num_blocks=64", "--token_budgets=8", "--max_num_seqs=8", "--prefill_chunk=8"),
)


def stages(scratch: pathlib.Path, sizes: Sizes, torch: str = sys.executable) -> dict[str, list[Command]]:
  """Returns all stages by name, in order.

  Args:
    scratch: absolute path for programs, weights, tokens and partial results.
    sizes: the sizes to measure.
    torch: the Python that has torch and transformers.
  """
  big, small = sizes.shapes
  code, twin = scratch / "code", scratch / "twin"
  programs, bundle = code / "programs", f"--executable_bundle={code / 'bundle'}"

  def engine(name: str, shape: str, limit_s: float, *words: str, cache: bool = True, flags: str = "") -> Command:
    kept = scratch / f"{name.replace(' ', '_')}.json"
    given = [f"--shape={shape}", f"--seconds={sizes.seconds}", f"--contexts={sizes.context}", f"--output={kept}"]
    given += [f"--compile_cache_dir={programs}"] if cache else []
    return Command(
      name, (sys.executable, "-m", "tools.bench.engine", *given, *sizes.engine, *words), limit_s, flags, kept
    )

  def decode(name: str, limit_s: float, *words: str, **settings: Any) -> Command:
    rungs = f"--batches={sizes.batches[0]}", f"--prompts={sizes.prefill}"
    return engine(name, big, limit_s, *sizes.pool, *rungs, *words, **settings)

  ladder = f"--max_num_seqs={sizes.rows}", f"--token_budgets={sizes.budgets}", f"--prefill_chunk={sizes.chunk}"
  ladder += (f"--num_blocks={sizes.blocks}",) if sizes.blocks else ()

  def offline(name: str, lengths: str, limit_s: float, *words: str) -> Command:
    asked = f"--requests={sizes.requests}", f"--lengths={lengths}"
    rungs = "--batches=1", f"--prompts={sizes.budgets.split(',')[0]}"
    return engine(name, big, limit_s, "--parts=offline", *ladder, *rungs, *asked, *words)

  rows = sizes.batches[1].split(",")[-1]
  one = f"--token_budgets={max(2, int(rows))}", f"--prefill_chunk={rows}", f"--max_num_seqs={rows}", f"--prompts={rows}"
  few = (
    f"--token_budgets={','.join(map(str, sorted({8, max(8, int(rows))})))}",
    *one[1:],
  )  # no rungs but the measured ones
  step = *one, "--parts=decode", f"--batches={rows}"
  files = f"--model={twin / 'model'}", f"--requests={twin / 'requests.jsonl'}"

  def peer(way: str, limit_s: float, *more: str) -> Command:
    words = (
      *more,
      f"--way={way}",
      f"--device={sizes.device}",
      f"--dtype={sizes.dtype}",
      f"--batch={min(64, sizes.requests)}",
    )
    tokens = f"--output_tokens={twin / way}.jsonl"
    return Command(f"twin_{way}", (torch, "-m", "tools.gpu.torch_engine", *files, *words, tokens), limit_s)

  making = ("-m", "tools.gpu.twin", f"--shape={big}", f"--dtype={sizes.dtype}", f"--out={twin}")
  making += f"--requests={sizes.requests}", f"--lengths={sizes.lengths}"
  bench = (
    "-m",
    "tools.bench_offline",
    *files,
    f"--output_tokens={twin / 'sluice.jsonl'}",
    *sizes.engine,
    *ladder,
  )
  bench += f"--dtype={sizes.dtype}", f"--compile_cache_dir={programs}"
  same = [sys.executable, "-m", "tools.bench.deterministic", "--random_weights=true"]
  same += [f"--model={ROOT / 'models' / 'shapes' / big}"]
  same += [f"--seconds={sizes.seconds / 4}", "--rounds=2", f"--context={sizes.context}", f"--requests={sizes.some}"]
  same += [f"--compile_cache_dir={programs}", f"--output={scratch / 'deterministic.json'}", *sizes.engine, *sizes.pool]
  same += [f"--batches={sizes.batches[0]}", f"--prompts={sizes.lengths.replace(',', ':')}", "--outputs=16:64"]
  answers = [sys.executable, "-m", "tools.bench_cloud.device_checks", "answers"]
  answers += ["--tiny"] if sizes.device == "cpu" else []
  trace = ",trace" if sizes.device == "cuda" else ""  # a CPU has no kernels to trace
  first = decode("decode_8b", 240, f"--parts=decode,alone,sampler{trace}", bundle, "--write_executable_bundle")
  return {
    "decode": [
      dataclasses.replace(first, fresh=code),  # for a cold start
      engine("decode_1b", small, 150, *sizes.pool, *few, f"--parts=decode{trace}", f"--batches={sizes.batches[1]}"),
    ],
    "start": [  # the same programs as decode_8b's
      decode("start_bundle", 60, "--parts=decode", "--seconds=0.01", bundle, cache=False),
      decode("start_cached", 90, "--parts=decode", "--seconds=0.01"),
    ],
    "offline": [offline("offline", sizes.lengths, 180)],
    "full": [offline("full", sizes.full, 180)],
    "overlap": [offline("offline_plain", sizes.lengths, 120, "--overlap=false")],
    "deterministic": [Command("deterministic", tuple(same), 170, kept=scratch / "deterministic.json")],
    # The small model's steps wait for the host, which updates the buffers.
    "buffers": [
      Command("answers_profiled", tuple(answers), 75, BUFFERS[_PROFILED]),
      *(engine(f"buffers_{name}", small, 60, *sizes.pool, *step, flags=flags) for name, flags in BUFFERS.items()),
    ],
    "twin": [
      Command("twin_made", (sys.executable, *making), 200),
      Command("twin_sluice", (sys.executable, *bench), 180),
      peer("static", 300, "--most_s=60"),  # its target is nearer; the other gets the remaining time
      peer("batching", 300),
    ],
  }


STAGES = tuple(stages(pathlib.Path("/"), TINY))


def compile_only(names: Sequence[str]) -> list[tuple[str, ...]]:
  """Returns `tools.check_device`'s flags to compile these stages' steps for an H200 without the hardware."""
  sizes, found = Sizes(), []
  rows = sizes.batches[1].split(",")[-1]
  if {"decode", "start"} & set(names):
    found.append((f"--model={BIG}", f"--token_budgets={_FEW_RUNGS}"))
  if "decode" in names:
    found.append((f"--model={SMALL}", f"--token_budgets=8,{rows}", f"--max_num_seqs={rows}"))
  if {"offline", "full", "overlap", "twin"} & set(names):
    found.append((f"--model={BIG}", f"--token_budgets={sizes.budgets}", f"--max_num_seqs={sizes.rows}"))
  if "deterministic" in names:
    found.append((f"--model={BIG}", "--deterministic"))
  if "buffers" in names:
    found.append((f"--model={SMALL}", f"--token_budgets={rows}", f"--max_num_seqs={rows}"))
  return found


def run(command: Command, deadline: float, log: Any) -> dict[str, Any]:
  """Runs a command until its limit or `deadline` (time.monotonic()); returns its result.

  A failed command's result has "error", beside its results so far.
  """
  started = time.monotonic()
  limit_s = max(0.0, min(command.limit_s, deadline - started))
  if limit_s == 0.0:
    return {"error": "out of time", "took_s": 0.0}
  environment = os.environ | _OFFLINE | {"PYTHONUNBUFFERED": "1"}
  if command.flags:
    environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {command.flags}".strip()
  if command.fresh:
    shutil.rmtree(command.fresh, ignore_errors=True)
  if command.kept:
    command.kept.unlink(missing_ok=True)
  log.write(f"\n== {command.name}: {' '.join(command.words)}\n")
  log.flush()
  begin = os.fstat(log.fileno()).st_size
  process = subprocess.Popen(
    command.words,
    cwd=ROOT,
    env=environment,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=log,
    text=True,
    start_new_session=True,
    umask=0o077,  # whatever this process has: the engine refuses programs that others could change
  )
  found: dict[str, Any]
  try:
    said, _ = process.communicate(timeout=limit_s)
    if process.returncode:
      found = {"error": f"{name_exit(process.returncode)}: {last_words(log.name, begin)}"}
    else:
      found = json.loads(said.strip().splitlines()[-1])
  except subprocess.TimeoutExpired:
    found = {"error": f"out of time after {limit_s:.0f} s"}
  except (ValueError, IndexError):
    found = {"error": "its last output line is not JSON"}
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)  # a session of its own, so that all its processes end with it
      with contextlib.suppress(subprocess.TimeoutExpired):  # a process held by the driver does not end
        process.communicate(timeout=ENDING_S)
  if "error" in found and command.kept and command.kept.exists():
    with contextlib.suppress(ValueError):  # killed during a write
      found = json.loads(command.kept.read_text("utf-8")) | found
  found["took_s"] = round(time.monotonic() - started, 1)
  return found


def measure(
  commands: Sequence[Command], deadline: float, log: Any, keep: Callable[[dict[str, dict[str, Any]]], None]
) -> dict[str, dict[str, Any]]:
  """Runs commands in order; returns each one's result by its name. Goes on after a failure.

  Args:
    deadline: limit for all, time.monotonic().
    log: open file for their output.
    keep: called with all results after each.
  """
  results: dict[str, dict[str, Any]] = {}
  for command in commands:
    if command.name.startswith("twin_") and "error" in results.get("twin_made", {}):
      found: dict[str, Any] = {"error": "has no model", "took_s": 0.0}
    else:
      found = run(command, deadline, log)
    results[command.name] = found
    if "error" not in found and command.name in ("twin_batching", "twin_static"):
      found |= _agreement(command)
    keep(results)
  return results


def _agreement(command: Command) -> dict[str, Any]:
  """Compares a twin's tokens with Sluice's, if both exist."""
  theirs = next(word.partition("=")[2] for word in command.words if word.startswith("--output_tokens="))
  try:
    tokens = read_tokens(theirs)
    own = read_tokens(str(pathlib.Path(theirs).with_name("sluice.jsonl")))
    found = compare({name: line for name, line in own.items() if name in tokens}, tokens)
  except (OSError, ValueError, ConfigError) as error:
    return {"tokens": str(error)}
  return {"agreeing_prefix": found.agreeing_prefix, "identical_requests": found.identical}


# --- the table --------------------------------------------------------------------------------------------------------


def _line(what: str, value: float | None, form: str, target: str, met: bool | None) -> str:
  shown = "-" if value is None else format(value, form)
  verdict = "" if met is None or value is None else "+" if met else "no"
  return f"{what:54s} {shown:>9s}  {target:>16s} {verdict}".rstrip()


def serial_roofline(result: Mapping[str, Any]) -> float:
  """Returns output tokens a second if KV reads, the matmuls of outputs and those of prompts ran one after the other.

  Memory holds the weights for so many rows that the weights' bytes hide behind the matmuls, as in Sluice's goals.
  """
  work, ceilings, (_, length) = result["work"], result["ceilings"], result["offline"]["lengths"]
  token, row = work["flops"]["token"], work["flops"]["row"]
  keys = 1.5 * length  # for an output token, on average: the prompt and half of the outputs
  seconds = work["kv_bytes"] * keys / ceilings["bytes_s"] + (token + row) / ceilings["flops_s"]
  return 1.0 / (seconds + token / ceilings["flops_s"])


def table(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
  """Returns a line for each figure, with its limit if there is one. Reads only the result of `measure`."""
  lines = [f"failed: {name}: {found['error']}" for name, found in results.items() if "error" in found]
  for name in ("decode_8b", "decode_1b"):
    if "ceilings" in results.get(name, {}):
      best = results[name]["ceilings"]
      lines.append(_line(f"{name}: read bandwidth, TB/s", best["bytes_s"] / 1e12, ".2f", "", None))
      lines.append(_line(f"{name}: matmul, TFLOP/s", best["flops_s"] / 1e12, ".0f", "", None))
  limits = {("decode_8b", rows): 1.35 for rows in (1, 8, 32, 64)} | {("decode_1b", 1): 2.0, ("decode_1b", 32): 1.6}
  for name in ("decode_8b", "decode_1b"):
    for row in results.get(name, {}).get("decode", []):
      limit = limits.get((name, row["batch"]))
      what, over = f"{name}: {row['batch']} x {row['context']}, over roofline", row["over_roofline"]
      lines.append(_line(what, over, ".2f", f"<= {limit}" if limit else "", over <= limit if limit else None))
    for row in results.get(name, {}).get("sampler", []):
      if row.get("of_step") is not None:
        what = f"{name}: sampler, {row['batch']} rows, {row['asked']}, of a step"
        lines.append(_line(what, row["of_step"], ".1%", "<= 8%", row["of_step"] <= 0.08))
    if "waits_share" in (
      row := results.get(name, {}).get("alone", {})
    ):  # decides whether several steps without the host pay off
      what, waits = f"{name}: one request alone, device idle", row["waits_share"]
      lines.append(_line(what, waits, ".1%", "<= 3%", waits <= 0.03))
  # Random weights are made on the device, so a start here includes no checkpoint load.
  starts = {"decode_8b": ("cold", 60), "start_cached": ("with the compile cache", None), "start_bundle": ("bundle", 10)}
  for name, (how, limit) in starts.items():
    took = results.get(name, {}).get("warmup_s")
    if took is not None:
      what, target = f"start, {how}: all rungs ran, s after the weights", f"<= {limit}" if limit else ""
      lines.append(_line(what, took, ".1f", target, took <= limit if limit else None))
  lines += [f"start, bundle: {reason}" for reason in results.get("start_bundle", {}).get("fallbacks", [])]
  for name in ("offline", "full"):
    found = results.get(name, {})
    if row := found.get("offline"):
      lines.append(_line(f"{name}: output tokens a second", row["output_tok_s"], ".0f", "", None))
      idle, host = row["device_idle_share"], sum(row["host_us"].values()) / 1e3
      lines.append(_line(f"{name}: device idle", idle, ".1%", "<= 3%", idle <= 0.03))
      lines.append(_line(f"{name}: host, ms a step", host, ".2f", "<= 0.5", host <= 0.5))
      compiles = found.get("compiles_after_ready")
      lines.append(_line(f"{name}: compiles after ready", compiles, "d", "<= 0", compiles == 0))
  if "offline" in results.get("full", {}):
    share = results["full"]["offline"]["output_tok_s"] / serial_roofline(results["full"])
    lines.append(_line("full: of the serial roofline", share, ".2f", ">= 0.55", share >= 0.55))
  both = [results.get(name, {}).get("offline") for name in ("offline", "offline_plain")]
  if both[0] and both[1]:
    gain = both[0]["output_tok_s"] / both[1]["output_tok_s"]
    lines.append(_line("offline: overlap over no overlap", gain, ".2f", "", None))
  found = results.get("deterministic", {})
  if "same_bits_in_ways" in found:
    lines.append(_line("deterministic: variants with the same bits", found["same_bits_in_ways"], "d", "", None))
  for row in found.get("work", []):
    lines.append(_line(f"deterministic: {row['work']}, times as long", row["ratio"], ".2f", "", None))
  found = results.get("answers_profiled", {})
  if "right" in found:
    right, asked = sum(found["right"].values()), len(found["right"]) * found["of_each"]
    what = f"command buffers, {_PROFILED}: right answers of {asked}"
    lines.append(_line(what, right, "d", "", None))
  for name in BUFFERS:
    for row in results.get(f"buffers_{name}", {}).get("decode", []):
      lines.append(_line(f"command buffers, {name}: ms a step", 1e3 * row["step_s"], ".3f", "", None))
  return lines + _twin_lines(results)


def _twin_lines(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
  lines = []
  own = results.get("twin_sluice", {}).get("output_tok_s")
  if own:
    lines.append(_line("twin: Sluice's output tokens a second", own, ".0f", "", None))
  for way, limit in (("batching", 5.0), ("static", 1.5)):
    found = results.get(f"twin_{way}", {})
    if own and "output_tok_s" in found:
      lines.append(_line(f"twin {way}: requests", found.get("requests"), "d", "", None))
      lines.append(
        _line(f"twin {way}: tokens before a first difference", found.get("agreeing_prefix"), ".1%", "", None)
      )
      ratio = own / found["output_tok_s"]
      lines.append(_line(f"twin {way}: Sluice over its tokens a second", ratio, ".2f", f">= {limit}", ratio >= limit))
  return lines
