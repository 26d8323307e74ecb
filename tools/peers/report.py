"""Summarizes a comparison: medians over rounds, ratios, one table, one file. Runs nothing, judges no speed."""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from engine.errors import ConfigError
from tools.measure import median_of, write_result

LATENCIES = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


def figures(rounds: Sequence[Mapping[str, Any]], *, online: bool) -> dict[str, float]:
  """Returns the medians of an engine's rounds; raises ConfigError if a request of a round failed."""
  for figure in rounds:
    if figure["failed"]:
      raise ConfigError(f"{figure['failed']} of {figure['requests']} requests did not get the requested tokens")
  names = ("output_tok_s", *(LATENCIES if online else ()))
  return {name: round(median_of(list(map(dict, rounds)), name), 3) for name in names}


def add_ratios(engines: Mapping[str, dict[str, Any]], *, online: bool) -> None:
  """Adds Sluice's ratio to each peer: above 1, Sluice is ahead (more tokens, or less time)."""
  own = engines["sluice"]["figures"]
  for name, engine in engines.items():
    if name != "sluice":
      theirs = engine["figures"]
      names = LATENCIES if online else ("output_tok_s",)
      engine["sluice_over_peer" if not online else "peer_over_sluice"] = {
        figure: round(theirs[figure] / own[figure] if online else own[figure] / theirs[figure], 3) for figure in names
      }


def verdict(agreement: Mapping[str, Any]) -> str:
  """Describes an engine's tokens in a few words."""
  if "f32_choices" in agreement:
    share = agreement["f32_choices"]
    judged = "not judged" if share is None else f"{share:.1%} as f32, {agreement['mean_margin']:.1e} below"
    beside = agreement.get("beside_sluice")
    if beside is None:
      return judged
    counts = f"{beside['first_tokens']} of {beside['requests']} first ones as Sluice's"
    return f"{judged}; {counts}, {beside['agreeing_tokens']} of {beside['tokens']} before another"
  if not agreement["differing_requests"]:
    return "identical"
  count = f"{len(agreement['differing_requests'])} differ"
  if agreement["same_tokens"] is None:
    return f"{count}, not judged"
  if agreement["same_tokens"]:
    return f"{count}, at ties ({agreement['worst_margin']:.0e})"
  return f"{count}, {agreement['beyond_ties']} tokens beyond ties (worst {agreement['worst_margin']:.0e})"


def table(run: Mapping[str, Any]) -> str:
  """Formats a run as Markdown."""
  online = run["mode"] == "online"
  names = ("TTFT p50", "p99 ms", "ITL p50", "p99 ms") if online else ("Sluice over it",)
  rows = [["engine", "tokens/s", *names, "ready s", "tokens"]]
  for name, engine in run["engines"].items():
    found = engine["figures"]
    if online:
      middle = [f"{found[figure]:.1f}" for figure in LATENCIES]
    else:
      ratio = engine.get("sluice_over_peer", {}).get("output_tok_s")
      middle = ["" if ratio is None else f"{ratio:.2f}"]
    rows.append(
      [name, f"{found['output_tok_s']:.1f}", *middle, f"{engine['ready_s']:.1f}", verdict(engine["agreement"])]
    )
  rows.insert(1, ["---"] * len(rows[0]))
  peers = [engine["peer_over_sluice"] for engine in run["engines"].values() if "peer_over_sluice" in engine]
  if peers:
    best = [f"{min(peer[figure] for peer in peers):.2f}" for figure in LATENCIES]
    rows.append(["best peer over sluice", "", *best, "", ""])
  lines = ["| " + " | ".join(row) + " |" for row in rows]
  if online:
    lines.append(f"offered: {run['workload']['rate']:.2f} requests/s")
  lines += [f"left out: {name}: {reason}" for name, reason in run["left_out"].items()]
  return "\n".join(lines)


def keep(path: str, run: dict[str, Any]) -> None:
  """Writes a run to the file; replaces one of the same shape, precision, mode, workload, flags and engines."""
  if not path:
    return

  def key(of: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("prompt_len", "output_len", "num_requests", "max_requests")
    sizes = [of.get("workload", {}).get(name) for name in names]
    flags = tuple(sorted(of.get("flags", ())))
    return of["shape"], of.get("precision", "f32"), of["mode"], *sizes, flags, *sorted(of["engines"])

  file = pathlib.Path(path)
  runs = json.loads(file.read_text("utf-8"))["runs"] if file.exists() else []
  write_result(path, {"runs": [*(other for other in runs if key(other) != key(run)), run]})
