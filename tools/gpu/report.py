"""Formats a short table of a run's records: ratios within the run, with their targets. Pure: measures nothing."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from tools.gpu.losses import SKIPPED
from tools.gpu.protocol import HANGS, OUT_OF_TIME, Record

MOST_LINES = 80
_MOST_FAILURES = 8
_UNSUPPORTED = NotImplementedError.__name__
_KV_DTYPES = {"uint8": "fp8"}  # what users call a pool's dtype
_MOST_STUCK = 6  # lines about a job that hung


def _timed(record: Record) -> bool:
  """Whether there is a time with the default settings."""
  return record["ok"] and "us" in record["figures"] and "tuning" not in record["job"]


_ERRORS = ("error", "query_error", "key_error", "value_error", "prompts", "next tokens")


@dataclasses.dataclass(frozen=True)
class Results:
  """The records of a run, looked up by their jobs' fields."""

  records: Sequence[Record]

  def figures(self, **job: Any) -> dict[str, Any] | None:
    """Returns the figures of the first timed job with these values that is not a sweep's; None if there is none."""
    for record in self.records:
      if _timed(record) and job.items() <= record["job"].items():
        return record["figures"]
    return None

  def best(self, figure: str, **job: Any) -> float | None:
    """Returns the greatest value of a figure over the jobs with these values."""
    values = [
      record["figures"][figure]
      for record in self.records
      if record["ok"] and job.items() <= record["job"].items() and figure in record["figures"]
    ]
    return max(values, default=None)

  @property
  def read_bandwidth(self) -> float | None:
    """Returns bytes a second: the best of all read kernels, torch's included, since a denominator must not be weak."""
    return max(
      (x for x in (self.best("bytes_per_s", what="read", kind=kind) for kind in ("ceiling", "peer")) if x), default=None
    )


def _number(value: float | None, form: str = ".2f") -> str:
  return "-" if value is None else format(value, form)


def _ratio(top: float | None, bottom: float | None) -> float | None:
  return None if top is None or not bottom else top / bottom


def _row(*cells: str) -> str:
  return f"{cells[0]:34s}" + "".join(f" {cell:>12s}" for cell in cells[1:])


def _verdict(value: float | None, target: float, stretch: float, at_most: bool = False) -> str:
  if value is None:
    return f"{target:g} ({stretch:g})"
  met = (lambda limit: value <= limit) if at_most else (lambda limit: value >= limit)
  return f"{target:g} ({stretch:g}) " + ("++" if met(stretch) else "+" if met(target) else "no")


def _kernels_us(results: Results, job: Mapping[str, Any]) -> float | None:
  """Returns the profiler's microseconds of a timed job's kernels."""
  return results.best("kernels_us", kind="profile", op=job["op"], spec=job["spec"])


def _decodes(results: Results) -> list[str]:
  bandwidth, targets = results.read_bandwidth, {"decode 32 x 4096": (0.85, 0.92), "decode 64 zipf": (0.70, 0.80)}
  lines = [_row("decode attention", "us", "kernels us", "share of read", "target", "torch us", "flashinfer")]
  for record in results.records:
    job = record["job"]
    if job["kind"] == "time" and job["op"] == "decode" and _timed(record):
      found, name = record["figures"], job["spec"]
      share = _ratio(found["bytes"] / found["us"] * 1e6, bandwidth)
      goal = _verdict(share, *targets[name]) if name in targets else ""
      if name == "decode 1 x 16384" and bandwidth:
        limit = 2e6 * found["bytes"] / bandwidth + 5
        goal = f"{limit:.1f} us " + ("+" if found["us"] <= limit else "no")
      lines.append(
        _row(
          name,
          f"{found['us']:.1f}",
          _number(_kernels_us(results, job), ".1f"),
          _number(share),
          goal,
          *_peers(results, name),
        )
      )
  return lines


def _peers(results: Results, name: str) -> tuple[str, str]:
  """Returns torch's best and FlashInfer's microseconds."""
  torch = [
    record["figures"]["us"]
    for record in results.records
    if record["ok"]
    and record["job"].get("spec") == name
    and record["job"]["kind"] == "peer"
    and record["job"]["what"] != "flashinfer"
  ]
  infer = results.figures(kind="peer", what="flashinfer", spec=name)
  return _number(min(torch, default=None), ".1f"), _number(infer["us"] if infer else None, ".1f")


def _prefills(results: Results) -> list[str]:
  lines = [_row("paged causal prefill", "us", "TFLOP/s", "of cuDNN", "target", "torch us", "flashinfer")]
  for record in results.records:
    job = record["job"]
    if job["kind"] == "time" and job["op"] == "prefill" and _timed(record):
      found, name = record["figures"], job["spec"]
      dense = results.figures(kind="time", op="dense", spec=name)
      share = _ratio(dense["us"] if dense else None, found["us"])
      goal = _verdict(share, 0.75, 0.9) if "4096" in name and " of " not in name else ""
      flops = found["flops"] / found["us"] / 1e6
      lines.append(_row(name, f"{found['us']:.1f}", f"{flops:.0f}", _number(share), goal, *_peers(results, name)))
  return lines


def _others(results: Results) -> list[str]:
  lines = [_row("rotary and write; whole layer; step", "us", "kernels us", "of its floor", "target")]
  for record in results.records:
    job = record["job"]
    if not _timed(record):
      continue
    found = record["figures"]
    if job["kind"] == "time" and job["op"] in ("write", "attend"):
      lines.append(_row(f"{job['op']}: {job['spec']}", f"{found['us']:.1f}", _number(_kernels_us(results, job), ".1f")))
    elif job["kind"] == "step":
      floor = results.read_bandwidth and found["bytes"] / results.read_bandwidth * 1e6
      over = _ratio(found["us"], floor)
      name = f"step: {job['rows']} x {job['context']}, Llama-3-8B"
      lines.append(_row(name, f"{found['us']:.0f}", "-", _number(over), _verdict(over, 1.35, 1.2, at_most=True)))
  return lines


def _ceilings(results: Results) -> list[str]:
  if not any(record["job"].get("what") for record in results.records):
    return []

  def text(kind: str) -> str:
    read, copy, matmul = (
      results.best("bytes_per_s", kind=kind, what="read"),
      results.best("bytes_per_s", kind=kind, what="copy"),
      results.best("flops_per_s", kind=kind, what="matmul"),
    )
    parts = _number(read and read / 1e12), _number(copy and copy / 1e12), _number(matmul and matmul / 1e12, ".0f")
    return f"read {parts[0]} TB/s, copy {parts[1]} TB/s, bf16 8192 matmul {parts[2]} TFLOP/s"

  return [f"ceilings: {text('ceiling')}; by torch: {text('peer')}"]


def _checks(results: Results) -> list[str]:
  checks = [record for record in results.records if record["job"]["kind"] == "check"]
  if not checks:
    return []
  right = [record for record in checks if record["ok"]]
  late = sum(record.get("error") == OUT_OF_TIME for record in checks)
  worst = max((record["figures"].get("error", 0.0) for record in right), default=0.0)
  wrong = sum(failed(record) for record in checks)
  rest = len(checks) - len(right) - late - wrong
  more = f", {rest} skipped or unsupported" if rest else ""
  return [
    f"correct: {len(right)} of {len(checks)} specs, {wrong} failed, {late} not reached{more}; largest error {worst:.1e}"
  ]


def _same_bits(results: Results) -> list[str]:
  """Returns the line of --deterministic; failures are listed with the others."""
  return [
    f"deterministic: the same bits in {found['ways']} variants, {found['preemptions']} preemptions among them; "
    f"every step has {found['tokens_a_step']} tokens"
    for record in results.records
    if record["job"]["kind"] == "deterministic" and record["ok"] and (found := record["figures"])
  ]


def name_verdict(record: Record) -> str:
  """Returns what became of a job: right, WRONG, HANGS, DIED, failed, skipped, not run or unsupported."""
  if record["ok"]:
    return "right"
  error = record["error"]
  if error == OUT_OF_TIME:
    return "not run"
  if error.startswith(SKIPPED):
    return "skipped"
  if error.startswith(_UNSUPPORTED):
    return "unsupported"
  if record.get("lost"):
    return "HANGS" if error.endswith(HANGS) else "DIED"
  return "WRONG" if error.startswith("Wrong") else "failed"


def failed(record: Record) -> bool:
  """Whether a part of Sluice failed.

  Peers, unfit settings of a sweep, lack of time, skipped jobs and those that the device does not support do not count.
  """
  job = record["job"]
  theirs = job["kind"] in ("peer", "profile") or job.get("op") == "dense"
  return name_verdict(record) in ("WRONG", "HANGS", "DIED", "failed") and not (theirs or "tuning" in job)


def _smokes(results: Results, right: str) -> list[str]:
  """Returns a line for each job of the smoke stage, and lines of the debugger about those that hung.

  Args:
    results: of the run.
    right: the word for a job that went well.
  """
  records = [record for record in results.records if record["job"]["kind"] == "smoke"]
  if not records:
    return []
  tries: dict[str, list[Record]] = {}
  for record in records:
    tries.setdefault(describe(record["job"]), []).append(record)
  verdicts = [right if found[-1]["ok"] else name_verdict(found[-1]) for found in tries.values()]
  counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts))
  lines = [f"smoke: each kernel alone on tiny data: {counts}"]
  for (name, found), verdict in zip(tries.items(), verdicts, strict=True):
    record, first = found[-1], name_verdict(found[0])
    if len(found) > 1:
      verdict = f"{verdict} twice" if first == verdict else f"{first}, then {verdict}"
    errors = [value for name, value in record.get("figures", {}).items() if name in _ERRORS]
    what = f"largest error {max(errors):.1e}" if record["ok"] and errors else ""
    if not record["ok"] and record["error"] != OUT_OF_TIME:
      what = record["error"].splitlines()[0][:200]
    lines.append(f"  {name:44s} {verdict:11s} {what}".rstrip())
    stuck = next((record["stuck"] for record in found if record.get("stuck")), [])
    lines += [f"    {line[:150]}" for line in stuck[:_MOST_STUCK]]
  return lines


def _losses(results: Results) -> list[str]:
  """Returns a line about the jobs that are skipped because of losses."""
  reasons = dict.fromkeys(r["error"] for r in results.records if not r["ok"] and name_verdict(r) == "skipped")
  count = sum(not record["ok"] and name_verdict(record) == "skipped" for record in results.records)
  return [f"{count} jobs were {'; '.join(reasons)}"] if count else []


def _failures(results: Results) -> list[str]:
  lines = [
    f"failed: {describe(record['job'])}: {record['error'].splitlines()[0][:200]}"
    for record in results.records
    if failed(record) and record["job"]["kind"] != "smoke"
  ]
  lines += [
    f"copies: {describe(record['job'])}: its program copies {record['figures']['copies']} arrays: do not trust its time"
    for record in results.records
    if _timed(record) and record["figures"].get("copies") and record["job"]["kind"] == "time"
  ]
  more = len(lines) - _MOST_FAILURES
  return lines[:_MOST_FAILURES] + ([f"and {more} more, see results.jsonl"] if more > 0 else [])


def describe(job: Mapping[str, Any]) -> str:
  """Describes a job in a few words."""
  names = ("kind", "implementation", "op", "what", "way", "spec", "rows", "context")
  words = [str(job[name]) for name in names if job.get(name)]
  words += [f"heads of {job['head_dim']}"] if "head_dim" in job else []
  if job.get("kv_dtype"):
    words.append(f"{_KV_DTYPES.get(job['kv_dtype'], job['kv_dtype'])} KV")
  if "tuning" in job:
    words.append(" ".join(f"{name}={value}" for name, value in (job["tuning"] | {"block": job["block_size"]}).items()))
  return " ".join(words)


def table(meta: Mapping[str, Any], records: Sequence[Record], notes: Sequence[str]) -> list[str]:
  """Returns at most MOST_LINES lines.

  Args:
    meta: the run's; see tools.gpu.
    records: records of all jobs.
    notes: further lines.
  """
  results = Results(records)
  dry = "" if meta["mode"] == "device" else " (dry: no time means anything)"
  head = (
    f"{meta.get('device', 'no device')}, {meta['mode']} run{dry} of {meta['minutes']:.1f} min, "
    f"jax {meta.get('jax', '-')}, commit {meta['commit']}, {meta['date']}"
  )
  card = meta.get("card_after") or meta.get("card_before")
  parts: list[Callable[[Results], list[str]]] = [_decodes, _prefills, _others]
  lines = [head, *([f"card (name, driver, memory, clocks, power, temperature): {card}"] if card else [])]
  lines += [
    *_smokes(results, "compiled" if meta["mode"] == "compile" else "right"),
    *_losses(results),
    *_ceilings(results),
    *_checks(results),
    *_same_bits(results),
  ]
  for part in parts:
    found = part(results)
    lines += found if len(found) > 1 else []
  lines += [*notes, *_failures(results)]
  return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"... {len(lines) - MOST_LINES + 1} more"]
