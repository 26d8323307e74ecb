"""The live page: its data over HTTP, and the page itself in a real Chromium, where there is one."""

import asyncio
from collections.abc import Iterator
import contextlib
import json
import re

import httpx
import pytest

from engine.block_pool import BlockPool
from engine.errors import Overloaded
from server.generation.serving_state import ServingState
from server.lifecycle.host import HostOptions
from server.page.live_feed import Feed, _cells
from server.page.page_routes import PUBLIC_PATHS
from server.proto import sluice_pb2 as pb
from server.telemetry.access_log import AccessLog
from server.telemetry.process_counts import count_process
from tests.server.harness import END, Served, generate, running, tiny_config
from tests.server.page.browser import open_page, url_of, wait_for_text

KEY = "page-key-0123456789abcdef"


@contextlib.contextmanager
def ticks(served: Served) -> Iterator[Iterator[dict]]:
  """What /live says."""
  with httpx.stream("GET", url_of(served, "/live"), timeout=30) as answer:
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    yield (json.loads(line[6:]) for line in answer.iter_lines() if line)


# The data.


def test_live_tells_what_the_engine_did(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served:
    generate(served, token_ids=pb.TokenIds(ids=range(20, 40)), stopping=pb.StopParams(max_tokens=5, ignore_eos=True))
    served.wait_until(lambda: served.engine.num_live == 0)
    with ticks(served) as live:
      first, second = next(live), next(live)
    stats = served.engine.stats(100)
    assert (first["state"], first["model"], first["output_tokens"]) == ("ready", "tiny", 5)
    assert first["finished"]["length"] == 1 and first["compiles"] == 0
    assert [rung[:2] for rung in first["rungs"]] == [[8, 8], [64, 64], [128, 64]]
    assert [sum(rung[place] for rung in first["rungs"]) for place in (2, 3, 4, 5)] == [
      stats.num_steps,
      stats.num_decode_tokens,
      stats.num_prefill_tokens,
      stats.num_padding_tokens,
    ]
    assert [step[:4] for step in first["steps"]] == [
      [step.shape_tokens, step.decode_tokens, step.prefill_tokens, step.padding] for step in stats.steps
    ]
    # Nothing happened since.
    assert second["steps"] == [] and second["now_s"] > first["now_s"]
    cells = first["kv"]["map"]
    assert sum(cell[2] for cell in cells) == 256 and sum(cell[1] for cell in cells) == stats.blocks_cached > 0
    assert sum(cell[0] for cell in cells) == 0
    assert first["first_token_s"][0] > 0 and first["gap_s"][0] > 0


def test_readers_are_limited_told_and_let_go(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served, contextlib.ExitStack() as stack:
    readers = [stack.enter_context(ticks(served)) for _ in range(16)]
    for reader in readers:
      next(reader)
    with httpx.stream("GET", url_of(served, "/live"), timeout=30) as refused:
      assert refused.status_code == 429
      assert "16 pages are watching already" in json.loads(refused.read())["error"]["message"]
    # A drain does not wait for pages that watch it.
    served.stop()
    served.thread.join(180)
    assert served.exit_code == [0]


def test_a_server_that_loads_has_a_page(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0), serve=False) as served:
    assert httpx.get(url_of(served)).status_code == 200
    assert "sluice_ready 0.0" in httpx.get(url_of(served, "/metrics")).text
    with ticks(served) as live:
      assert next(live)["state"] == "starting"


def test_a_slow_reader_gets_the_newest_tick():
  async def run() -> None:
    state = ServingState()

    async def census():
      return count_process(AccessLog(), 0.0)

    feed = Feed(state, census, tick_s=0.001, max_readers=1)
    reader = feed.messages()
    await anext(reader)
    with pytest.raises(Overloaded):
      await anext(feed.messages())
    before = feed._num_ticks
    while feed._num_ticks < before + 5:
      await asyncio.sleep(0.001)
    await anext(reader)  # at once: there is news
    feed.close()
    assert [message async for message in reader] == []
    assert feed._num_readers == 0

  asyncio.run(run())


@pytest.mark.catalogue("H9")
def test_files_have_a_strict_policy_and_load_nothing_from_elsewhere(tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served:
    for path in PUBLIC_PATHS:
      answer = httpx.get(url_of(served, path))
      assert answer.status_code == 200
      policy = answer.headers["content-security-policy"]
      assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
      assert answer.headers["x-content-type-options"] == "nosniff"
      # The namespace of the icon's picture is a name, not an address that is loaded.
      found = set(re.findall(r"https?://[^\s\"'`)]+", answer.text)) - {"http://www.w3.org/2000/svg"}
      assert not found, found
      for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in answer.text, "text of a model must never become markup"


@pytest.mark.catalogue("H8")
def test_keys_guard_the_data_and_not_the_files(tokenizer, tmp_path):
  keys = tmp_path / "keys"
  keys.write_text(KEY + "\n")
  keys.chmod(0o600)
  with running(tokenizer, host=HostOptions(http_port=0, api_key_file=str(keys))) as served:
    for path in PUBLIC_PATHS:
      assert httpx.get(url_of(served, path)).status_code == 200
    for path in ("/live", "/metrics"):
      assert httpx.get(url_of(served, path)).status_code == 401
    assert httpx.get(url_of(served, "/metrics"), headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_cells_of_a_pool_of_any_size():
  for size in (1, 1023, 1024, 1025, 5000):
    states = bytes(number % 3 for number in range(size))
    cells = _cells(states)
    assert len(cells) <= 1024
    assert [sum(cell[place] for cell in cells) for place in range(3)] == [states.count(2), states.count(1), size]


def test_states_of_blocks():
  pool = BlockPool(4)
  first, second, third = pool.allocate_blocks(3)
  pool.publish_block(first, b"a")
  pool.publish_block(second, b"b")
  pool.release_blocks([second, third])
  wanted = dict.fromkeys(range(1, 5), 0) | {first: 2, second: 1}
  assert list(pool.block_states()) == [wanted[block] for block in range(1, 5)]


# In a browser.


def test_the_page_shows_the_engine_and_streams(chromium, tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served, open_page(chromium, served) as page:
    wait_for_text(page, "#state", "^ready$")
    wait_for_text(page, "#model", "^tiny$")
    page.wait_for_function("() => document.querySelectorAll('#rungs tr').length === 3")
    served.runner.seconds = 0.01
    page.fill("#prompt", "the cat")
    page.fill("#max_tokens", "40")
    page.fill("#seed", "3")  # some seeds end it before there is any text
    page.press("#prompt", "Enter")
    wait_for_text(page, "#played", r"ended: (stop|length)$")
    assert re.search(r"first token after \d", page.text_content("#played"))
    assert page.text_content(".talk .asked") == "the cat" and page.text_content(".talk .answer")
    wait_for_text(page, "[data-reason=stop], [data-reason=length]", ".")
    page.wait_for_function(
      "() => [...document.querySelectorAll('#ended dd')].reduce((sum, each) => sum + Number(each.textContent), 0) === 1"
    )
    # A tick may show the end while the map is still of the step before.
    page.wait_for_function("() => /KV pool: 0 in use/.test(document.getElementById('kv-map').ariaLabel)")
    # The bars add up, and the canvases are not empty.
    page.wait_for_function(
      "() => [...document.querySelectorAll('.bar')].some((bar) => bar.children[2].clientWidth > 0)"
    )
    for canvas in ("steps-chart", "kv-map", "output-chart"):
      page.wait_for_function(
        "(id) => { const c = document.getElementById(id);"
        " return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(Boolean); }",
        arg=canvas,
      )


def test_stop_ends_the_work(chromium, tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served, open_page(chromium, served) as page:
    wait_for_text(page, "#state", "^ready$")
    served.runner.go.clear()
    page.select_option("#mode", "completion")
    page.fill("#prompt", "the dog")
    page.fill("#max_tokens", "400")
    page.fill("#temperature", "1.5")
    page.click("#send")
    served.wait_until(lambda: served.engine.num_live == 1)
    page.click("#stop")
    wait_for_text(page, "#played", "^ended: stopped$")
    served.wait_until(lambda: len(served.generations) == 0)
    served.runner.go.set()
    served.wait_until(lambda: served.engine.num_live == 0 and served.blocks_in_use == 0)
    page.wait_for_function(
      "() => !document.querySelector('#send').disabled && document.querySelector('#stop').disabled"
    )


def test_errors_are_shown_and_markup_stays_text(chromium, tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served, open_page(chromium, served) as page:
    wait_for_text(page, "#state", "^ready$")
    evil = "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
    page.fill("#prompt", evil)
    page.fill("#max_tokens", "3")
    page.click("#send")
    wait_for_text(page, "#played", "ended: ")
    assert page.text_content(".talk .asked") == evil
    assert page.locator(".talk img, .talk script").count() == 0 and page.title() == "Sluice"
    # What a model says, too: an answer of markup, as its stream would bring it.
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": evil}, "finish_reason": "stop"}]})
    page.route(
      "**/v1/chat/completions",
      lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\ndata: [DONE]\n\n"),
    )
    page.click("#clear")
    page.fill("#prompt", "say it")
    page.click("#send")
    wait_for_text(page, "#played", "ended: stop$")
    assert page.text_content(".talk .answer") == evil
    assert page.locator(".talk img, .talk script").count() == 0 and page.title() == "Sluice"
    page.unroute("**/v1/chat/completions")
    # An error in the middle of an answer stands in the conversation.
    broken = f"data: {chunk}\n\ndata: {json.dumps({'error': {'message': 'it broke'}})}\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=broken))
    page.fill("#prompt", "more")
    page.click("#send")
    wait_for_text(page, ".talk .error", "^it broke$")
    page.wait_for_function(
      "() => (e => e.scrollTop + e.clientHeight >= e.scrollHeight - 1)(document.querySelector('#talk'))"
    )


def test_a_refused_message_stays_in_the_input_with_the_error_beside_it(chromium, tokenizer):
  config = tiny_config(max_num_seqs=1, max_queued_requests=1, eos_token_ids=(END,))
  host = HostOptions(http_port=0)
  with running(tokenizer, host=host, config=config) as served, open_page(chromium, served) as page:
    wait_for_text(page, "#state", "^ready$")
    page.fill("#prompt", "the cat")
    page.fill("#max_tokens", "512")
    page.click("#send")
    assert "max" in wait_for_text(page, "#refusal", ".")
    assert page.input_value("#prompt") == "the cat" and page.get_attribute("#prompt", "aria-invalid") == "true"
    assert page.locator(".talk .asked").count() == 0
    page.fill("#max_tokens", "5")
    served.runner.go.clear()
    with contextlib.ExitStack() as others:
      for live in (1, 2):  # one runs, one waits
        call = served.generation.Generate(pb.GenerateRequest(text="a", stopping=pb.StopParams(max_tokens=5)))
        others.callback(call.cancel)
        served.wait_until(lambda live=live: served.engine.num_live == live)
      page.press("#prompt", "Enter")
      wait_for_text(page, "#refusal", "queue")
      assert page.input_value("#prompt") == "the cat" and page.locator(".talk .asked").count() == 0
      served.runner.go.set()
    served.wait_until(lambda: served.engine.num_live == 0)
    page.press("#prompt", "Enter")
    wait_for_text(page, "#played", r"ended: (stop|length)$")
    assert page.input_value("#prompt") == "" and page.text_content("#refusal") == ""
    assert page.get_attribute("#prompt", "aria-invalid") is None
    assert page.text_content(".talk .asked") == "the cat"


def test_samples_are_for_the_demo_model_alone(chromium, tokenizer):
  for model, is_shown in (("tiny", False), ("sluice-demo", True)):
    host = HostOptions(http_port=0)
    with running(tokenizer, host=host, model=model) as served, open_page(chromium, served) as page:
      wait_for_text(page, "#model", f"^{model}$")
      assert page.is_visible("#samples") is is_shown


def test_a_key_is_asked_for_and_used(chromium, tokenizer, tmp_path):
  keys = tmp_path / "keys"
  keys.write_text(KEY + "\n")
  keys.chmod(0o600)
  options = HostOptions(http_port=0, api_key_file=str(keys))
  with running(tokenizer, host=options) as served, open_page(chromium, served) as page:
    page.wait_for_function("() => document.querySelector('#key-box').open")
    page.fill("#key", KEY)
    page.press("#key", "Tab")
    wait_for_text(page, "#state", "^ready$")


def test_narrow_dark_and_by_keyboard(chromium, tokenizer):
  looks = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
  with running(tokenizer, host=HostOptions(http_port=0)) as served, open_page(chromium, served, **looks) as page:
    wait_for_text(page, "#state", "^ready$")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert page.evaluate(
      f"{top.format('#send')} < window.innerHeight && {top.format('#send')} < {top.format('.tiles')}"
    )
    assert page.evaluate(
      "document.querySelector('.scroll').scrollWidth <= document.querySelector('.scroll').clientWidth"
    )
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.click("#settings summary")
    page.focus("#talk")
    reached = []
    for _ in range(20):
      page.keyboard.press("Tab")
      reached.append(page.evaluate("document.activeElement.id"))
    wanted = ["prompt", "send", "mode", "max_tokens", "temperature", "top_p", "top_k", "seed"]
    assert [name for name in reached if name in wanted][: len(wanted)] == wanted
    unnamed = (
      "[...document.querySelectorAll('input, select, textarea')].filter((e) => !e.labels.length && !e.ariaLabel)"
    )
    assert page.evaluate(f"{unnamed}.length") == 0


def test_nothing_jumps_when_figures_come(chromium, tokenizer):
  with running(tokenizer, host=HostOptions(http_port=0)) as served, open_page(chromium, served) as page:
    wait_for_text(page, "#state", "^ready$")
    page.evaluate(
      "window.shift = 0; new PerformanceObserver((list) => list.getEntries().forEach((e) => window.shift += e.value))"
      ".observe({ type: 'layout-shift', buffered: true })"
    )
    for _ in range(3):
      generate(served, text="the cat sat", stopping=pb.StopParams(max_tokens=50, ignore_eos=True))
    page.wait_for_function("() => document.querySelector('[data-reason=length]').textContent === '3'")
    assert page.evaluate("window.shift") < 0.1
