"""Defines the cost table: a step's time from five slopes. tools.simulate.fit_costs makes it; the simulator reads it.

Standard library only. The time of a step on the device is

  rung_s[T]                      linear layers, logits and sampling of T padded tokens: a look-up, since shapes are few;
                                 if the device skips padding (`by_tokens`), of T tokens in use
  + decode_row_s * rows          attention of rows with one token, and
  + decode_key_s * keys          the keys that they read: position + 1 each
  + prefill_token_s * tokens     attention of rows with several tokens,
  + prefill_key_s * keys         the keys that they read: start + n each, and
  + prefill_pair_s * pairs       the (query, key) pairs under the causal mask: n * start + n * (n + 1) / 2

The host's time to plan, pack and dispatch has a constant, a slope for each row, prefill token and admission, and a
constant for a step with prompt tokens (continuing decodes are packed once). Its time to commit values has a constant
and a slope for each row.

Steps of equal work do not take equal times. After an idle moment or a step with prompt tokens, caches are cold and
threads asleep. `cold_s` holds the extra time of the next steps, until decodes alone have run for 32 steps. `spread`
covers the rest (late threads, other programs): quantiles of measured over modeled time, which the simulator samples.
Without them every 99th percentile would be too small. They depend on the rung and on the device's previous state
(After): a saturated engine's steps vary little, steps after a pause or after small steps vary more. The host's launches
have such quantiles by Launch.
"""

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
import enum
import json
import math
import pathlib
from typing import Any, NamedTuple

from engine.errors import ConfigError

FORMAT = "sluice step costs 1"
_IDLE_S = 1e-3  # a device without work for longer counts as idle
_COLD_LAUNCHES = 2  # most cold launches of decodes alone after a pause or a prompt
WARM_AFTER = 32  # steps
WORK_COSTS = ("decode_row_s", "decode_key_s", "prefill_token_s", "prefill_key_s", "prefill_pair_s")


class AttentionWork(NamedTuple):
  """The attention work of a step; see the module docstring."""

  decode_rows: int
  decode_keys: int
  prefill_tokens: int
  prefill_keys: int
  prefill_pairs: int


def work_of(starts: Sequence[int], counts: Sequence[int]) -> AttentionWork:
  """Returns the work of rows that cover positions [starts[r], starts[r] + counts[r])."""
  rows = len(counts)
  if sum(counts) == rows:
    return AttentionWork(rows, sum(starts) + rows, 0, 0, 0)
  decode_rows = decode_keys = tokens = keys = pairs = 0
  for start, count in zip(starts, counts, strict=True):
    if count == 1:
      decode_rows += 1
      decode_keys += start + 1
    else:
      tokens += count
      keys += start + count
      pairs += count * start + count * (count + 1) // 2
  return AttentionWork(decode_rows, decode_keys, tokens, keys, pairs)


def corner(rungs: Sequence[int], tokens: int) -> tuple[int, float]:
  """Returns the index of the measured rung at or above a token count, and its weight in the interpolated time.

  The rung below has the rest of the weight. Counts below the smallest rung use that rung; counts above the largest
  use the largest.
  """
  index = min(bisect.bisect_left(rungs, tokens), len(rungs) - 1)
  if not index or tokens >= rungs[index]:
    return index, 1.0
  return index, (tokens - rungs[index - 1]) / (rungs[index] - rungs[index - 1])


class After(enum.StrEnum):
  """The device's state before a step."""

  IDLE = "idle"  # idle for at least _IDLE_S
  SMALLER = "smaller"  # a step of less than half its tokens
  ALIKE = "alike"  # a step of at least half its tokens


class Launch(enum.StrEnum):
  """A kind of launch: decodes alone, or with prompt tokens; cold ones follow a change."""

  DECODES = "decodes"
  COLD_DECODES = "cold_decodes"  # at most _COLD_LAUNCHES steps after a pause or a prompt
  PROMPTS = "prompts"
  COLD_PROMPTS = "cold_prompts"  # after a pause

  @classmethod
  def of(cls, has_prompt: bool, since_cold: int, after: After) -> "Launch":
    """Returns the kind of a step; the arguments are those of Warmth."""
    if has_prompt:
      return cls.COLD_PROMPTS if after is After.IDLE else cls.PROMPTS
    return cls.COLD_DECODES if since_cold < _COLD_LAUNCHES else cls.DECODES


class Warmth:
  """Tracks the device's state before each of its steps; receives all steps in order."""

  def __init__(self):
    self._free_at = -math.inf
    self._count = self._tokens = 0

  def step(self, planned_at: float, tokens: int, has_prompt: bool) -> tuple[int, After]:
    """Returns the number of steps of decodes alone since a pause or prompt tokens, and the device's state before.

    Call ended() next.

    Args:
      planned_at: when the host began the step, seconds.
      tokens: the rung's tokens.
    """
    if planned_at - self._free_at > _IDLE_S:
      since, after = 0, After.IDLE
    else:
      since, after = self._count, After.SMALLER if 2 * self._tokens < tokens else After.ALIKE
    self._count = 0 if has_prompt else since + 1
    self._tokens = tokens
    return since, after

  def skip_decodes(self, count: int) -> None:
    """Counts further steps like the latest one, of decodes alone; a negative count takes steps back."""
    self._count += count

  def ended(self, at: float) -> None:
    """Records when the step leaves the device free, seconds."""
    self._free_at = at


@dataclasses.dataclass(frozen=True)
class HostCosts:
  """The host's part of a step, in seconds.

  Attributes:
    launch_s, launch_row_s, launch_token_s, launch_admission_s: plan, pack and dispatch: a constant, and slopes for
      each row, prefill token and admitted request.
    commit_s, commit_row_s: commit of values: a constant, and a slope for each row.
    launch_prefill_s: additional constant of a launch with prompt tokens.
    front_s: a request's time outside the engine before its first token: client, network, front end.
  """

  launch_s: float = 0.0
  launch_row_s: float = 0.0
  launch_token_s: float = 0.0
  launch_admission_s: float = 0.0
  commit_s: float = 0.0
  commit_row_s: float = 0.0
  launch_prefill_s: float = 0.0
  front_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepCosts:
  """The cost table of one model on one device.

  Attributes:
    rung_s: (tokens, seconds) by increasing tokens, with interpolation between them.
    decode_row_s, decode_key_s, prefill_token_s, prefill_key_s, prefill_pair_s: slopes; see the module docstring.
    host: the host's part.
    kv_bytes_per_token: KV bytes of a token in the whole model, for KV transfers.
    cold_s: a step's extra time 0, 1, 2 to 3, 4 to 7, 8 to 15 and 16 to 31 steps after the device was cold.
    spread: (tokens, quantiles) by increasing tokens for each After; empty: steps take exactly the modeled time.
    launch_spread: quantiles of measured over modeled launch_seconds, for each Launch.
    by_tokens: whether the device skips the ladder's padding, so a step's time depends on its tokens, not its rung.
    about: device, model, dtype, versions, method, error of the fit; plain JSON values.
  """

  rung_s: tuple[tuple[int, float], ...]
  decode_row_s: float = 0.0
  decode_key_s: float = 0.0
  prefill_token_s: float = 0.0
  prefill_key_s: float = 0.0
  prefill_pair_s: float = 0.0
  host: HostCosts = HostCosts()
  kv_bytes_per_token: int = 0
  cold_s: tuple[float, ...] = ()
  spread: Mapping[After, tuple[tuple[int, tuple[float, ...]], ...]] = dataclasses.field(default_factory=dict)
  launch_spread: Mapping[Launch, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  by_tokens: bool = False
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    tokens = [tokens for tokens, _ in self.rung_s]
    if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
      raise ConfigError(f"rung_s names the rungs {tokens}; they must be increasing and at least 1, measure again")
    values = [seconds for _, seconds in self.rung_s] + [getattr(self, name) for name in WORK_COSTS]
    values += dataclasses.astuple(self.host)
    spreads = [quantiles for rungs in self.spread.values() for _, quantiles in rungs] + [*self.launch_spread.values()]
    values += (*self.cold_s, *(factor for quantiles in spreads for factor in quantiles))
    bad = [value for value in values if not 0 <= value < math.inf]
    if bad:
      raise ConfigError(f"a cost of {bad[0]!r} s is not a finite time of 0 or more; measure again")
    if not all(spreads) or not all(self.spread.values()):
      raise ConfigError("a spread has no quantile; measure again")
    object.__setattr__(self, "_known", dict(self.rung_s))

  def rung(self, tokens: int) -> float:
    """Returns the seconds of a step padded to `tokens`, without attention; smaller steps cost the smallest rung.

    Raises:
      ConfigError: `tokens` exceeds the largest measured rung.
    """
    known: dict[int, float] = self._known  # type: ignore[attr-defined]
    found = known.get(tokens)
    if found is None:
      if tokens > self.rung_s[-1][0]:
        raise ConfigError(
          f"a step of {tokens} tokens is above {self.rung_s[-1][0]}, the largest that the cost table has; "
          "measure with --token_budgets that reach it, or lower the budgets"
        )
      index, share = corner([rung for rung, _ in self.rung_s], tokens)
      above_s, below_s = self.rung_s[index][1], self.rung_s[max(0, index - 1)][1]
      found = known[tokens] = below_s + (above_s - below_s) * share
    return found

  def charged(self, rung: int, used: int) -> int:
    """Returns the number of tokens that a step's time depends on; `used` excludes the ladder's padding."""
    return min(rung, used) if self.by_tokens else rung

  def attention(self, work: AttentionWork) -> float:
    """Returns the seconds of a step that depend on its contents, not its shape."""
    return (
      self.decode_row_s * work.decode_rows
      + self.decode_key_s * work.decode_keys
      + self.prefill_token_s * work.prefill_tokens
      + self.prefill_key_s * work.prefill_keys
      + self.prefill_pair_s * work.prefill_pairs
    )

  def seconds(self, tokens: int, work: AttentionWork) -> float:
    """Returns the seconds of a step on the device; `tokens` is the rung's token budget."""
    return self.rung(self.charged(tokens, work.decode_rows + work.prefill_tokens)) + self.attention(work)

  def cold(self, since_cold: int) -> float:
    """Returns a step's extra seconds, so many steps after the device was cold."""
    index = since_cold.bit_length()
    return self.cold_s[index] if index < len(self.cold_s) else 0.0

  def factors(self, tokens: int, after: After) -> tuple[float, ...]:
    """Returns equally likely factors of a step's seconds; a rung without its own uses the next one's."""
    spread = self.spread.get(after)
    return spread[min(bisect.bisect_left(spread, (tokens,)), len(spread) - 1)][1] if spread else (1.0,)

  def launch_factors(self, kind: Launch) -> tuple[float, ...]:
    """Returns equally likely factors of launch_seconds()."""
    return self.launch_spread.get(kind, (1.0,))

  def launch_seconds(self, rows: int, prefill_tokens: int, admissions: int) -> float:
    """Returns the host's seconds to plan, pack and dispatch a step."""
    host = self.host
    return (
      host.launch_s
      + host.launch_row_s * rows
      + host.launch_token_s * prefill_tokens
      + host.launch_admission_s * admissions
      + (host.launch_prefill_s if prefill_tokens else 0.0)
    )

  def commit_seconds(self, rows: int) -> float:
    """Returns the host's seconds to commit the values of a step."""
    return self.host.commit_s + self.host.commit_row_s * rows

  def scaled(self, factor: float) -> "StepCosts":
    """Returns the table of a device that takes `factor` times as long, with the same host."""
    slopes = {name: getattr(self, name) * factor for name in WORK_COSTS}
    return dataclasses.replace(self, rung_s=tuple((tokens, s * factor) for tokens, s in self.rung_s), **slopes)

  # Files.

  def save(self, path: str) -> None:
    """Writes JSON that load() reads."""
    value = {
      "format": FORMAT,
      **self.about,
      "rung_s": {str(tokens): seconds for tokens, seconds in self.rung_s},
      **{name: getattr(self, name) for name in WORK_COSTS},
      "host": dataclasses.asdict(self.host),
      "cold_s": self.cold_s,
      "spread": {after: {str(tokens): each for tokens, each in rungs} for after, rungs in self.spread.items()},
      "launch_spread": self.launch_spread,
      "by_tokens": self.by_tokens,
      "kv_bytes_per_token": self.kv_bytes_per_token,
    }
    pathlib.Path(path).write_text(json.dumps(value, indent=1) + "\n", "utf-8")

  @classmethod
  def load(cls, path: str) -> "StepCosts":
    """Reads what save() wrote.

    Raises:
      ConfigError: the file is missing, or is no cost table.
    """
    remedy = "make one with python -m tools.simulate.measure_costs --model=DIR --output=FILE"
    try:
      value = json.loads(pathlib.Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
      raise ConfigError(f"cost table {path} cannot be read ({error}); {remedy}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
      raise ConfigError(f"{path} is no cost table of the format {FORMAT!r}; {remedy}")
    try:
      del value["format"]
      rungs = sorted((int(tokens), float(seconds)) for tokens, seconds in value.pop("rung_s").items())
      slopes = {name: float(value.pop(name)) for name in WORK_COSTS}
      host = HostCosts(**{name: float(seconds) for name, seconds in value.pop("host").items()})
      spread = {
        After(after): tuple(sorted((int(tokens), tuple(map(float, each))) for tokens, each in rungs.items()))
        for after, rungs in value.pop("spread", {}).items()
      }
      kv_bytes = int(value.pop("kv_bytes_per_token"))
      cold = tuple(map(float, value.pop("cold_s", ())))
      launches = value.pop("launch_spread", {})
      by_tokens = bool(value.pop("by_tokens", False))
      return cls(
        tuple(rungs),
        **slopes,
        host=host,
        kv_bytes_per_token=kv_bytes,
        cold_s=cold,
        spread=spread,
        launch_spread={Launch(kind): tuple(map(float, each)) for kind, each in launches.items()},
        by_tokens=by_tokens,
        about=value,
      )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise ConfigError(f"cost table {path} is damaged ({type(error).__name__}: {error}); {remedy}") from error


def roofline(
  model: Mapping[str, Any],
  *,
  tflops: float,
  gb_s: float,
  compute_efficiency: float,
  bandwidth_efficiency: float,
  overhead_s: float,
  max_tokens: int,
  bytes_per_value: int = 2,
) -> StepCosts:
  """Estimates a table from a model's shape and a device's peaks, and notes that in `about`.

  A step streams all weights once and multiplies T tokens by them. It takes the longer of the two times plus a constant
  (launches, sampling). Attention adds the time to read keys and values, or to multiply them if that is longer.
  (Roofline: Williams et al., 2009.)

  Args:
    model: a Hugging Face config.json with the fields of Llama.
    tflops, gb_s: the device's peaks; the efficiencies are the shares of them that kernels reach.
    overhead_s: the constant of every step.
    max_tokens: the largest rung.
    bytes_per_value: the size of a weight and of a KV value.

  Raises:
    ConfigError: the config lacks a field.
  """
  try:
    hidden, layers, heads = (model[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads = model.get("num_key_value_heads") or heads
    head_dim = model.get("head_dim") or hidden // heads
    intermediate, vocab = model["intermediate_size"], model["vocab_size"]
  except KeyError as error:
    raise ConfigError(f"the model's config lacks {error}; give a Llama-shaped config.json") from error
  layer = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * intermediate
  weights = layers * layer + vocab * hidden
  flops, bandwidth = tflops * 1e12 * compute_efficiency, gb_s * 1e9 * bandwidth_efficiency
  stream_s, token_s = weights * bytes_per_value / bandwidth, 2 * layers * layer / flops
  knee = min(max(1, math.ceil(stream_s / token_s)), max_tokens)
  rungs = {tokens: max(stream_s, tokens * token_s) + overhead_s for tokens in (1, knee, max_tokens)}
  kv_bytes = 2 * layers * kv_heads * head_dim * bytes_per_value
  return StepCosts(
    tuple(sorted(rungs.items())),
    decode_key_s=kv_bytes / bandwidth,
    prefill_key_s=kv_bytes / bandwidth,
    prefill_pair_s=4 * layers * heads * head_dim / flops,
    kv_bytes_per_token=kv_bytes,
    about={
      "source": "roofline, not measured",
      "model": model.get("_name_or_path") or "unnamed",
      "shape": {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
      },
      "weights": weights,
      "tflops": tflops,
      "gb_s": gb_s,
      "compute_efficiency": compute_efficiency,
      "bandwidth_efficiency": bandwidth_efficiency,
      "overhead_s": overhead_s,
      "knee_tokens": knee,
    },
  )
