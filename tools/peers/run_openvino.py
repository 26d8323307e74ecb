"""Serves request files with OpenVINO GenAI's continuous batching, in its own environment. Imports nothing of Sluice."""

import pathlib
import time

from tools.peers import face


def convert(model, folder, precision, group_size):
  """Converts the model to OpenVINO's format in one precision, once; returns its folder.

  int8 is OpenVINO's default, a scale and zero point an output; int4 has them by group, and int8 in embedding and head.
  """
  target = pathlib.Path(folder) / (f"openvino_{precision}" + (f"_{group_size}" if precision == "int4" else ""))
  if not (target / ".done").exists():
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig  # pyright: ignore[reportMissingImports]

    bits = {"int8": {"bits": 8}, "int4": {"bits": 4, "group_size": group_size, "ratio": 1.0}}.get(precision)
    made = OVModelForCausalLM.from_pretrained(
      model,
      export=True,
      compile=False,
      load_in_8bit=False,
      quantization_config=None if bits is None else OVWeightQuantizationConfig(**bits),
    )
    made.save_pretrained(target)
    (target / ".done").touch()
  return target


def main():
  """See face."""
  parser = face.parser(__doc__)
  parser.add_argument("--kv_gb", type=int, default=1)
  parser.add_argument("--kv", choices=("f32", "f16", "u8"), help="precision of the KV cache; f32, or u8 below f32")
  parser.add_argument(
    "--arithmetic", choices=("f32", "bf16"), default="f32", help="OpenVINO's own choice is bf16 on processors with AMX"
  )
  parser.add_argument("--group_size", type=int, default=128, help="inputs that share a scale in int4")
  args = parser.parse_args()
  kv = args.kv or ("f32" if args.precision == "f32" else "u8")

  def begin():
    import openvino  # pyright: ignore[reportMissingImports]
    import openvino_genai  # pyright: ignore[reportMissingImports]

    folder = convert(args.model, args.work, args.precision, args.group_size)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = args.kv_gb
    scheduler.max_num_seqs = args.max_requests
    scheduler.enable_prefix_caching = False
    properties = {
      "INFERENCE_PRECISION_HINT": args.arithmetic,
      "KV_CACHE_PRECISION": kv,
      "INFERENCE_NUM_THREADS": args.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def submit(request, log, handles):
      config = openvino_genai.GenerationConfig()
      config.max_new_tokens = request["output_len"]
      config.ignore_eos = True
      config.do_sample = False
      config.set_eos_token_id(0)  # a model without one gives -1, which OpenVINO refuses; it is ignored either way
      log.sent(request["id"])
      prompt = openvino.Tensor([request["prompt"]])
      handles[request["id"]] = pipeline.add_request(len(handles), prompt, config)

    def run(requests, log, start_s, realtime):
      waiting = sorted(requests, key=lambda request: -request["arrival_s"] if realtime else 0.0)
      handles, missing = {}, {request["id"]: request["output_len"] for request in requests}
      while missing:
        running = len(handles) + len(missing) - len(requests)
        # OpenVINO itself would exceed max_num_seqs: with 1 it runs two requests at once.
        for request in face.due(waiting, start_s, realtime, args.max_requests - running):
          submit(request, log, handles)
        if not pipeline.has_non_finished_requests():
          time.sleep(max(0.0, start_s + waiting[-1]["arrival_s"] - time.monotonic()))
          continue
        pipeline.step()
        for identity in list(missing):
          handle = handles.get(identity)
          if handle is not None and handle.can_read():
            for output in handle.read().values():
              log.got(identity, output.generated_ids)
              missing[identity] -= len(output.generated_ids)
            if missing[identity] <= 0:
              del missing[identity]

    weights = args.precision + (f", groups of {args.group_size}" if args.precision == "int4" else "")
    return face.Peer(
      {"threads": args.threads, "kv_gb": args.kv_gb, "weights": weights, "kv": kv, "arithmetic": args.arithmetic}, run
    )

  face.serve(begin)


if __name__ == "__main__":
  main()
