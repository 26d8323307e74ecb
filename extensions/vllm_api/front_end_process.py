"""A front end process that also serves vLLM's engine protocol; otherwise as server/lifecycle/front_end_process.py."""

from extensions.vllm_api.composition import VllmComposition
from server.lifecycle import front_end_process

if __name__ == "__main__":
  front_end_process.main(VllmComposition)
