"""Serves request files with Sluice's engine in this process, for tools.peers. Judges nothing."""

from collections.abc import Sequence
from typing import Any

from engine.device.options import BuildOptions
from engine.settings import UNBOUNDED_QUEUE
from tools.bench_offline import OfflineRun
from tools.peers import face
from tools.workload import WorkRequest

QUANTIZATIONS = {"f32": "none", "int8": "w8a8", "int4": "int4"}
TOKEN_BUDGETS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
  """See face."""
  parser = face.parser(__doc__)
  parser.add_argument(
    "--overlap", choices=("auto", "true", "false"), default="auto", help="see the server's flag of this name"
  )
  parser.add_argument("--quantization", default="", help="see the server's flag of this name; default: by --precision")
  parser.add_argument("--kv_dtype", default="", help="see the server's flag of this name; default: int8 below f32")
  parser.add_argument("--quantization_group_size", type=int, default=0, help="see the server's flag of this name")
  args = parser.parse_args()
  quantization = args.quantization or QUANTIZATIONS[args.precision]
  kv_dtype = args.kv_dtype or ("auto" if args.precision == "f32" else "int8")

  def begin() -> face.Peer:
    options = BuildOptions(
      model_dir=args.model,
      max_num_seqs=args.max_requests,
      token_budgets=TOKEN_BUDGETS,
      kv_cache_mb=1024,
      max_model_len=args.max_len,
      overlap=args.overlap,
      quantization=quantization,
      quantization_group_size=args.quantization_group_size,
      kv_dtype=kv_dtype,
      prefix_cache_scope="off",  # every round serves the same prompts
      speculation="none",  # as the peers; and a model with random weights repeats itself
      compile_cache_dir=f"{args.work}/programs",
      **UNBOUNDED_QUEUE,
    )
    engine = OfflineRun(options)

    def run(requests: Sequence[dict[str, Any]], log: face.Log, _start_s: float, realtime: bool) -> None:
      fields = ("id", "arrival_s", "prompt", "output_len")
      work = [WorkRequest(*(line[name] for name in fields)) for line in requests]
      for outcome in engine.serve(work, realtime=realtime):
        if outcome.error:
          raise SystemExit(f"request {outcome.id!r}: {outcome.error}")
        times = {name: getattr(outcome, name) for name in ("intended_s", "sent_s", "chunks", "tokens")}
        log.take(outcome.id, **times)

    config = engine.built.config
    about: dict[str, Any] = {
      "token_budgets": list(TOKEN_BUDGETS),
      "prefill_chunk": config.prefill_chunk,
      "overlap": config.overlap,
      "fallbacks": list(engine.built.fallbacks),
    }
    about |= {"threads": "every core", "weights": quantization, "kv": kv_dtype.replace("auto", "f32")}
    return face.Peer(about, run)

  face.serve(begin)


if __name__ == "__main__":
  main()
