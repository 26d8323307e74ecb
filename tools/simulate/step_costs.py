"""The cost table: a step's time from five slopes. tools.simulate.fit_costs makes it, the simulator reads it.

Standard library only. The time of a step on the device is

  rung_s[T]                      linear layers, logits and sampling of T padded tokens: a look-up, since shapes are few;
                                 where the device leaves padding out (`by_tokens`), of T tokens in use
  + decode_row_s * rows          attention of rows with one token, and
  + decode_key_s * keys          the keys they walk: position + 1 each
  + prefill_token_s * tokens     attention of rows with several tokens,
  + prefill_key_s * keys         the keys they read: start + n each, and
  + prefill_pair_s * pairs       the (query, key) pairs that causality leaves: n * start + n * (n + 1) / 2

and the host takes a constant, a slope a row, a slope a prefill token, a slope an admission and a constant for a step
with prompt tokens (decodes that go on are packed once) to plan, pack and dispatch, and a constant and a slope a row to
take values in.

Steps of equal work do not take equal times. After an idle moment or a step with prompt tokens, caches are cold and
threads asleep: `cold_s` holds what the next steps take longer for it, until decodes alone have run for 32 steps. What
is left (threads that wake late, other programs) is `spread`: quantiles of measured over modelled time, from which the
simulator samples. Without them the medians would be right and every 99th percentile too small. They are by rung and by
what the device did before (After): a saturated engine's steps are near each other, those after a pause or after small
steps are not. Likewise the host's launches, by Launch.
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
_IDLE_S = 1e-3  # a device without work for longer was idle
_COLD_LAUNCHES = 2  # of decodes alone, after a pause or a prompt
WARM_AFTER = 32  # steps
WORK_COSTS = ("decode_row_s", "decode_key_s", "prefill_token_s", "prefill_key_s", "prefill_pair_s")


class AttentionWork(NamedTuple):
  """The attention work of a step; see the module."""

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
  """Where so many tokens lie between measured rungs: the index of the rung at or above, and its share of the time.

  The rest is the share of the rung below. Fewer tokens than the smallest rung count as that rung, more than the
  largest as the largest.
  """
  index = min(bisect.bisect_left(rungs, tokens), len(rungs) - 1)
  if not index or tokens >= rungs[index]:
    return index, 1.0
  return index, (tokens - rungs[index - 1]) / (rungs[index] - rungs[index - 1])


class After(enum.StrEnum):
  """The device's state before a step."""

  IDLE = "idle"  # nothing, for _IDLE_S at least
  SMALLER = "smaller"  # a step of less than half its tokens
  ALIKE = "alike"  # a step of at least half its tokens


class Launch(enum.StrEnum):
  """A kind of launch: pure decodes, or with prompt tokens; cold ones follow a change."""

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
  """The device's state before each of its steps; takes all of them in order."""

  def __init__(self):
    self._free_at = -math.inf
    self._count = self._tokens = 0

  def step(self, planned_at: float, tokens: int, has_prompt: bool) -> tuple[int, After]:
    """How many steps of decodes alone ran since the device was idle or had prompt tokens, and what was before.

    To be followed by ended().

    Args:
      planned_at: when the host began with the step, seconds.
      tokens: of its rung.
    """
    if planned_at - self._free_at > _IDLE_S:
      since, after = 0, After.IDLE
    else:
      since, after = self._count, After.SMALLER if 2 * self._tokens < tokens else After.ALIKE
    self._count = 0 if has_prompt else since + 1
    self._tokens = tokens
    return since, after

  def ended(self, at: float) -> None:
    """When the step leaves the device free, seconds."""
    self._free_at = at


@dataclasses.dataclass(frozen=True)
class HostCosts:
  """Seconds of the host's part of a step.

  Attributes:
    launch_s, launch_row_s, launch_token_s, launch_admission_s: plan, pack and dispatch: constant, a row, a prefill
      token, an admitted request.
    commit_s, commit_row_s: taking values in: constant, a row.
    launch_prefill_s: as launch_s, more of it for a step with prompt tokens.
    front_s: what a request spends outside the engine before its first token: client, network, front end.
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
    rung_s: (tokens, seconds) by increasing tokens; between two the time is interpolated.
    decode_row_s, decode_key_s, prefill_token_s, prefill_key_s, prefill_pair_s: see the module.
    host: the host's part.
    kv_bytes_per_token: of the whole model, for transfers of KV.
    cold_s: what a step takes longer 0, 1, 2 to 3, 4 to 7, 8 to 15 and 16 to 31 steps after the device was cold.
    spread: (tokens, quantiles) by increasing tokens, by what was before; see the module. Without: as the table says.
    launch_spread: quantiles of the same kind, of launch_seconds.
    by_tokens: the device leaves the ladder's padding out: a step's time is that of its tokens, whatever its rung.
    about: device, model, dtype, versions, how it was measured, error of the fit; plain JSON values.
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
    """Seconds of a step padded to `tokens`, attention not included; a rung below the smallest costs what it costs.

    Raises:
      ConfigError: more tokens than were measured.
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
    """Of a step's tokens, how many its time is that of; `used` are all but the ladder's padding."""
    return min(rung, used) if self.by_tokens else rung

  def attention(self, work: AttentionWork) -> float:
    """Seconds of a step that depend on what is in it, not on its shape."""
    return (
      self.decode_row_s * work.decode_rows
      + self.decode_key_s * work.decode_keys
      + self.prefill_token_s * work.prefill_tokens
      + self.prefill_key_s * work.prefill_keys
      + self.prefill_pair_s * work.prefill_pairs
    )

  def seconds(self, tokens: int, work: AttentionWork) -> float:
    """Seconds of a step on the device: `tokens` is the rung's budget."""
    return self.rung(self.charged(tokens, work.decode_rows + work.prefill_tokens)) + self.attention(work)

  def cold(self, since_cold: int) -> float:
    """Seconds to add to a step, so many steps after the device was cold."""
    index = since_cold.bit_length()
    return self.cold_s[index] if index < len(self.cold_s) else 0.0

  def factors(self, tokens: int, after: After) -> tuple[float, ...]:
    """What to multiply a step's seconds by, each as likely as the others; a rung without any has the next one's."""
    spread = self.spread.get(after)
    return spread[min(bisect.bisect_left(spread, (tokens,)), len(spread) - 1)][1] if spread else (1.0,)

  def launch_factors(self, kind: Launch) -> tuple[float, ...]:
    """As factors(), of launch_seconds()."""
    return self.launch_spread.get(kind, (1.0,))

  def launch_seconds(self, rows: int, prefill_tokens: int, admissions: int) -> float:
    """Seconds of the host to plan, pack and dispatch a step."""
    host = self.host
    return (
      host.launch_s
      + host.launch_row_s * rows
      + host.launch_token_s * prefill_tokens
      + host.launch_admission_s * admissions
      + (host.launch_prefill_s if prefill_tokens else 0.0)
    )

  def commit_seconds(self, rows: int) -> float:
    """Seconds of the host to take in the values of a step."""
    return self.host.commit_s + self.host.commit_row_s * rows

  def scaled(self, factor: float) -> "StepCosts":
    """The table of a device that takes `factor` times as long; the host stays as it is."""
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
      ConfigError: no such file, or it is no cost table.
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
  """A table from a model's shape and a device's peaks, for what nobody measured; it says so in `about`.

  A step streams all weights once and multiplies T tokens by them: the longer of the two, and a constant (launches,
  sampling). Attention adds the keys and values it reads, or the products it makes. (Roofline: Williams et al., 2009.)

  Args:
    model: a Llama-shaped config.json of Hugging Face.
    tflops, gb_s: the device's peaks; the efficiencies are the shares of them that kernels reach.
    overhead_s: of every step.
    max_tokens: the largest rung.
    bytes_per_value: of weights and KV.

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
