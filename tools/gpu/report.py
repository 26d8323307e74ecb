"""Formats a short table of a run's records: ratios within the run, with their targets. Pure: measures nothing."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from tools.gpu.protocol import OUT_OF_TIME, Record

MOST_LINES = 40
_MOST_FAILURES = 8


def _timed(record: Record) -> bool:
  """Whether there is a time with the default settings."""
  return record["ok"] and "us" in record["figures"] and "tuning" not in record["job"]


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


def _ceilings(results: Results) -> str:
  def text(kind: str) -> str:
    read, copy, matmul = (
      results.best("bytes_per_s", kind=kind, what="read"),
      results.best("bytes_per_s", kind=kind, what="copy"),
      results.best("flops_per_s", kind=kind, what="matmul"),
    )
    parts = _number(read and read / 1e12), _number(copy and copy / 1e12), _number(matmul and matmul / 1e12, ".0f")
    return f"read {parts[0]} TB/s, copy {parts[1]} TB/s, bf16 8192 matmul {parts[2]} TFLOP/s"

  return f"ceilings: {text('ceiling')}; by torch: {text('peer')}"


def _checks(results: Results) -> str:
  checks = [record for record in results.records if record["job"]["kind"] == "check"]
  right = [record for record in checks if record["ok"]]
  late = sum(record.get("error") == OUT_OF_TIME for record in checks)
  worst = max((record["figures"].get("error", 0.0) for record in right), default=0.0)
  wrong = len(checks) - len(right) - late
  return f"correct: {len(right)} of {len(checks)} specs, {wrong} failed, {late} not reached; largest error {worst:.1e}"


def _same_bits(results: Results) -> list[str]:
  """Returns the line of --deterministic; failures are listed with the others."""
  return [
    f"deterministic: the same bits in {found['ways']} variants, {found['preemptions']} preemptions among them; "
    f"every step has {found['tokens_a_step']} tokens"
    for record in results.records
    if record["job"]["kind"] == "deterministic" and record["ok"] and (found := record["figures"])
  ]


def failed(record: Record) -> bool:
  """Whether a part of Sluice failed; peers, unfit settings of a sweep and lack of time do not count."""
  job = record["job"]
  theirs = job["kind"] in ("peer", "profile") or job.get("op") == "dense"
  return not (record["ok"] or record["error"] == OUT_OF_TIME or theirs or "tuning" in job)


def _failures(results: Results) -> list[str]:
  lines = [
    f"failed: {describe(record['job'])}: {record['error'].splitlines()[0][:140]}"
    for record in results.records
    if failed(record)
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
  words = [str(job[name]) for name in ("kind", "op", "what", "way", "spec", "rows", "context") if name in job]
  words += ["fp8 KV"] * ("kv_dtype" in job)
  if "tuning" in job:
    words.append(" ".join(f"{name}={value}" for name, value in (job["tuning"] | {"block": job["block_size"]}).items()))
  return " ".join(words)


def table(meta: Mapping[str, Any], records: Sequence[Record], sweep: Sequence[str]) -> list[str]:
  """Returns at most MOST_LINES lines.

  Args:
    meta: the run's; see tools.gpu.
    records: records of all jobs.
    sweep: a line a factor.
  """
  results = Results(records)
  dry = "" if meta["mode"] == "device" else " (dry: no time means anything)"
  head = (
    f"{meta.get('device', 'no device')}, {meta['mode']} run{dry} of {meta['minutes']:.1f} min, "
    f"jax {meta.get('jax', '-')}, commit {meta['commit']}, {meta['date']}"
  )
  parts: list[Callable[[Results], list[str]]] = [_decodes, _prefills, _others]
  lines = [head, _ceilings(results), _checks(results), *_same_bits(results)]
  for part in parts:
    found = part(results)
    lines += found if len(found) > 1 else []
  lines += [*(f"sweep: {line}" for line in sweep), *_failures(results)]
  return lines if len(lines) <= MOST_LINES else [*lines[: MOST_LINES - 1], f"... {len(lines) - MOST_LINES + 1} more"]
