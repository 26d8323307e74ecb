"""Serves request files with transformers' continuous batching, in its own environment. Imports nothing of Sluice.

It also judges tokens. An order {"judge": FILE, "output": FILE} has lines {"id", "prompt", "tokens"}; the answer to each
is the distance of every token's logit from the largest, given the tokens before it: 0 for the greedy choice.
"""

import contextlib

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
from transformers.utils import logging  # pyright: ignore[reportMissingImports]

from tools.peers import face, transformers_batching

PAGE_SIZE = 256
SLOTS = 32  # sequences at once: 16 and 64 are slower on two cores, as is a limit on tokens a step


def margins(model, prompt, tokens):
  """Returns each token's distance from the largest logit, f32, given the prompt and the tokens before it."""
  logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
  return (logits.max(dim=-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]).tolist()


def main():
  """See face."""
  parser = face.parser(__doc__)
  parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
  parser.add_argument("--judge_only", action="store_true", help="no batching: only judges tokens")
  args = parser.parse_args()
  logging.set_verbosity_error()
  logging.disable_progress_bar()
  torch.set_num_threads(args.threads)
  torch.set_grad_enabled(False)

  def begin():
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=args.attention)
    model.eval()

    def judge(prompt, tokens):
      return margins(model, prompt, tokens)

    if args.judge_only:
      return face.Peer({}, judge=judge)
    manager = open_until_the_end.enter_context(
      transformers_batching.batching(
        model,
        page_size=PAGE_SIZE,
        num_blocks=3 * args.max_requests,
        max_len=args.max_len,
        max_requests=min(SLOTS, args.max_requests),
      )
    )
    rounds = iter(range(1 << 60))  # part of requests' names, so that each is used once

    def run(requests, log, _start_s, realtime):
      if realtime:
        raise SystemExit("transformers is compared offline only")
      transformers_batching.generate(manager, requests, f"round{next(rounds)}-", log.got, log.sent)

    about = {"attention": args.attention, "slots": SLOTS, "threads": args.threads, "weights": "f32", "kv": "f32"}
    return face.Peer(about, run, judge)

  with contextlib.ExitStack() as open_until_the_end:
    face.serve(begin)


if __name__ == "__main__":
  main()
