"""Writes the head of the cloud benchmark's page as HTML: the machine and each part's outcome. Measures nothing."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from tools.bench.engine import table as engine_table

_STYLE = (
  "<style>.facts td { text-align: left; white-space: normal } pre { white-space: pre-wrap; font-size: 13px }</style>"
)


def _rows(cells: Sequence[Sequence[str]]) -> str:
  return "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in cells)


def describe_run(about: Mapping[str, Any]) -> list[tuple[str, str]]:
  """Returns the rows of the first table: device, driver, versions, commit, date."""
  facts, machine = about.get("facts", {}), about["machine"]
  memory = facts.get("memory_bytes", 0)
  versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
  named = (
    f"{facts.get('num_devices', 0)} x {facts['device']}" if "device" in facts else "unknown: the device did not start"
  )
  return [
    ("Device", named + (f", {memory / 2**30:.0f} GiB each" if memory else "")),
    ("NVIDIA driver", facts.get("driver") or "none"),
    ("Packages", versions or "unknown"),
    ("Host", f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"),
    ("Commit", about["commit"]),
    ("Date", about["date"]),
    ("Took", f"{about['minutes']:.1f} minutes" + (" (dry run: no time means anything)" if about["dry_run"] else "")),
  ]


def describe_part(name: str, found: Mapping[str, Any]) -> str:
  """Returns a part's outcome in a few words."""
  if "left_out" in found:
    return f"left out: {found['left_out']}"
  if "error" in found:
    return f"failed: {found['error']}"
  if "right" in found:
    return f"{sum(found['right'].values())} of {found['of_each'] * len(found['right'])} known answers right"
  if "checks" in found:
    worst = max(check["norm_error"] for check in found["checks"])
    rate = f"{found['decode']}: {found['us']:g} us, {found['read_bytes_s'] / 1e9:.0f} GB/s of KV"
    return f"{found['attention']} agrees with the reference within {worst:.1e} of its norm; {rate}"
  if "table" in found:
    return next((line for line in found["table"] if line.startswith("correct:")), "measured")
  if "offline" in found:
    return f"{found['model']}: {found['offline']['output_tok_s']:.0f} output tokens/s offline"
  if "burst" in found:
    return f"{found['burst']['output_tok_s']:.0f} output tokens/s, {found['burst']['completed']} requests answered"
  servers = {key: value for key, value in found.items() if isinstance(value, dict) and "run_files" in value}
  if servers:
    said = (
      f"{key}: {value['error']}" if "error" in value else f"{key}: {value['burst']['output_tok_s']:.0f} output tokens/s"
      for key, value in servers.items()
    )
    return "; ".join(said)
  return "done"


def make_lead(about: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> str:
  """Returns the HTML above the tables and plots of the served runs."""
  outcomes = [(name, describe_part(name, found), f"{found.get('took_s', 0):.0f} s") for name, found in parts.items()]
  pieces = [_STYLE]
  pieces.append(f'<table class="facts">\n{_rows(describe_run(about))}</table>')
  pieces.append(f'<h2>Parts</h2>\n<table class="facts">\n{_rows(outcomes)}</table>')
  for name, found in parts.items():
    text = "\n".join(found.get("table", ()))
    if "ceilings_seen" in found:
      text = engine_table(dict(found))
    notes = "\n".join(f"note: {note}" for note in (*found.get("notes", ()), *found.get("fallbacks", ())))
    if text or notes:
      pieces.append(f"<h2>{html.escape(name)}</h2>\n<pre>{html.escape(text)}\n{html.escape(notes)}</pre>")
  pieces.append("<h2>Served load</h2>")
  return "\n".join(pieces)
