"""Sets up transformers' continuous batching for forced greedy outputs, and waits for them. Has no clock.

In torch's own environment (Python 3.10 or later); imports nothing of Sluice. For run_transformers and tools.gpu.
"""

import dataclasses

from transformers import ContinuousBatchingConfig, GenerationConfig  # pyright: ignore[reportMissingImports]


def batching(model, *, page_size, num_blocks, max_len, max_requests=None, max_batch_tokens=None, compile_level=0):
  """Returns the context manager of a generation thread, with `num_blocks` pages of `page_size` tokens.

  Args:
    num_blocks: None: as many as the device has memory for.
    max_len: most output tokens of a request.
    max_requests, max_batch_tokens: sequences and tokens a step; None: transformers decides.
    compile_level: 0 is eager mode, 1 torch.compile with dynamic shapes.
  """
  names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
  pages = "page_size" if "page_size" in names else "block_size"  # up to transformers 5.17
  return model.continuous_batching_context_manager(
    generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max_len),
    continuous_batching_config=ContinuousBatchingConfig(
      **{pages: page_size},
      num_blocks=num_blocks,
      max_batch_tokens=max_batch_tokens,
      max_requests_per_batch=max_requests,
      allow_block_sharing=False,
      default_compile_level=compile_level,
    ),
    block=True,
    timeout=30,
  )


def generate(manager, requests, prefix, done, sent=lambda identity: None):
  """Submits all requests at once and waits until each has ended.

  Args:
    requests: dicts with id, prompt and output_len; their names are `prefix` and the id, and must be new.
    done: done(id, tokens) receives each result.
    sent: sent(id) is called just before a request is submitted.

  Raises:
    SystemExit: a request failed, or the generation thread has stopped.
  """
  names = {}
  for request in requests:
    name = f"{prefix}{request['id']}"
    names[name] = request["id"]
    sent(request["id"])
    manager.add_request(request["prompt"], request_id=name, max_new_tokens=request["output_len"], eos_token_id=-1)
  while names:
    result = manager.get_result(timeout=1)
    if result is None:
      if not manager.is_running():
        raise SystemExit("transformers' generation thread stopped before all requests were done")
    elif result.error:
      raise SystemExit(f"transformers failed on request {result.request_id}: {result.error}")
    elif result.is_finished():
      done(names.pop(result.request_id), list(result.generated_tokens))
