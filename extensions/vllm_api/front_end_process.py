"""A front end process that also speaks vLLM's engine protocol; otherwise server/lifecycle/front_end_process.py."""

from extensions.vllm_api.composition import VllmComposition
from server.lifecycle import front_end_process

if __name__ == "__main__":
  front_end_process.main(VllmComposition)
