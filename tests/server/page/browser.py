"""Opens the live page of a test's server in a real Chromium. tests/conftest.py has the browser."""

from collections.abc import Iterator
import contextlib

from tests.server.harness import Served


def url_of(served: Served, path: str = "/") -> str:
  return f"http://127.0.0.1:{served.host.http_port}{path}"


@contextlib.contextmanager
def open_page(chromium, served: Served, **context) -> Iterator:
  """The page of a server; fails at its end if the browser had anything to complain of."""
  troubles: list[str] = []
  with contextlib.closing(chromium.new_context(**context)) as tab:
    page = tab.new_page()
    page.set_default_timeout(120_000)
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url_of(served, "")) else troubles.append("away"))
    page.goto(url_of(served))
    yield page
  assert [text for text in troubles if not text.startswith("Failed to load resource")] == []


def wait_for_text(page, selector: str, pattern: str) -> str:
  """The element's text, once it is there and fits the pattern."""
  page.wait_for_function(
    "([selector, pattern]) => new RegExp(pattern, 's').test(document.querySelector(selector)?.textContent ?? '')",
    arg=[selector, pattern],
  )
  return page.text_content(selector)
