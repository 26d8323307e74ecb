"""The load's judgement of streams, with a real server and with one whose outputs differ from the expected ones."""

import asyncio
import dataclasses

from tools.fleet.checked_streams import StreamLoad, Verdict, learn_outputs
from tools.server_process import RunningServer


async def run_load(server, http_port, known, count, **options):
  load = StreamLoad(server.target, f"http://127.0.0.1:{http_port}", known, **options)
  load.set_streams(6)
  async with asyncio.timeout(120):
    while len(load.ends) < count:
      await asyncio.sleep(0.01)
  load.set_streams(2)
  await load.stop()
  assert load.num_open == 0
  return load


def test_it_tells_each_kind_of_end(tmp_path):
  http_file = tmp_path / "http"
  flags = ["--fake_device", "--fake_step_ms=1", "--http_port=0", f"--http_port_file={http_file}"]
  with RunningServer(flags, tmp_path / "log") as server:
    http_port = http_file.read_text().strip()
    known = learn_outputs(server.target, count=9, max_tokens=(20, 30))
    assert len({request.prompt for request in known}) == 9
    assert all(len(request.token_ids) <= request.max_tokens for request in known)
    known = [request for request in known if request.text]  # a random token may end an output, or have no text
    assert len(known) > 4

    def run(requests, **options):
      return asyncio.run(run_load(server, http_port, requests, 30, **options))

    load = run(known)
    assert load.count_verdicts().keys() == {Verdict.FINISHED} and {end.protocol for end in load.ends} == {
      "grpc",
      "http",
    }
    assert load.find_faults(allow_errors=False) == []
    load = run(known, cancelled_share=0.5)
    assert load.count_verdicts()[Verdict.CANCELLED] > 0 and load.find_faults() == []
    wrong = [
      dataclasses.replace(request, token_ids=(1, *request.token_ids), text="?" + request.text) for request in known
    ]
    assert run(wrong).count_verdicts().keys() == {Verdict.WRONG}
    longer = [
      dataclasses.replace(request, token_ids=(*request.token_ids, 1), text=request.text + "?") for request in known
    ]
    load = run(longer)
    assert load.count_verdicts().keys() == {Verdict.CUT_SHORT} and len(load.find_faults()) == len(load.ends)
    refused = [dataclasses.replace(request, max_tokens=-1) for request in known]
    load = run(refused)
    assert load.count_verdicts().keys() == {Verdict.ERROR} and load.find_faults() == []
    assert len(load.find_faults(allow_errors=False)) == len(load.ends)
    assert {end.protocol for end in load.ends if "max_tokens=-1" in end.said} == {"grpc", "http"}
  load = asyncio.run(run_load(server, http_port, known, 6))
  assert load.count_verdicts().keys() == {Verdict.ERROR}, "nobody listens there"
  silent = [dataclasses.replace(known[0], max_tokens=3000)]
  slow = ["--fake_device", "--fake_step_ms=100000", *flags[2:], "--step_timeout_s=0", "--drain_timeout_s=0"]
  with RunningServer([*slow, "--watchdog_grace_s=0.1"], tmp_path / "log2") as server:
    load = asyncio.run(run_load(server, http_file.read_text().strip(), silent, 6, silence_s=0.3))
    assert load.count_verdicts().keys() == {Verdict.SILENT} and len(load.find_faults()) == len(load.ends)
