"""Lines of /v1/embeddings in batches, on the demo model: what single requests give, in free slots alone."""

from pathlib import Path

import openai

from engine.device.build import build_engine
from engine.device.options import BuildOptions
from server.lifecycle.host import HostOptions
from server.text.tokenizer import Tokenizer
from tests.server.harness import running
from tests.server.http.batches.batch_client import create, make_line, read, wait
from tests.server.http.conftest import url_of

DEMO = Path(__file__).resolve().parents[4] / "models" / "demo"
URL = "/v1/embeddings"


def test_lines_of_embeddings_give_what_single_requests_give(tmp_path):
  options = BuildOptions(
    str(DEMO), token_budgets=(64,), max_num_seqs=8, num_blocks=256, max_model_len=512, enable_embeddings=True
  )
  built = build_engine(options, lambda *_: None, lambda _: None)
  host = HostOptions(http_port=0, batch_dir=str(tmp_path))
  with (
    running(Tokenizer(DEMO), config=built.config, device=built.runner, host=host, model="demo") as served,
    openai.OpenAI(base_url=f"{url_of(served)}/v1", api_key="unused", max_retries=0, timeout=60) as sdk,
  ):
    texts = [f"number {number}" for number in range(200)]
    lines = [make_line(str(number), {"input": text}, URL) for number, text in enumerate(texts[:20])]
    lines += [make_line("all", {"input": texts, "dimensions": 16}, URL), make_line("bad", {"input": []}, URL)]
    made, most = create(sdk, lines, URL), 0
    while sdk.batches.retrieve(made.id).status in ("validating", "in_progress"):
      most = max(most, len(served.generations))
    batch = wait(sdk, made.id)
    answers = {each["custom_id"]: each["response"]["body"]["data"] for each in read(sdk, batch.output_file_id)}
    [error] = read(sdk, batch.error_file_id)
    assert error["custom_id"] == "bad" and error["response"]["status_code"] == 400
    single = sdk.embeddings.create(model="", input=texts)
    for number in range(20):
      [found] = answers[str(number)]
      assert max(abs(a - b) for a, b in zip(found["embedding"], single.data[number].embedding, strict=True)) < 1e-4
    assert [len(each["embedding"]) for each in answers["all"]] == [16] * 200
    # A line that begins has one even if others have just filled the slots.
    assert 1 < most <= 7 + 7
