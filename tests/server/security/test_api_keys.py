"""API keys: what a file may be, who is let in, and that nothing tells a key."""

from collections.abc import Callable
import contextlib
import hmac
import math
import os
import random
import statistics
import time

import pytest

from engine.errors import ConfigError
from server.errors import PermissionDenied, Unauthenticated
from server.security.api_keys import MAX_FILE_BYTES, AdminKeys, ApiKeys, bind_tenant

ADMIN = "a-key-of-an-admin"
KEYS = [f"key-number-{index:02d}-of-the-file" for index in range(5)]


def write(path, text: str | bytes, mode: int = 0o600):
  """Another file in the same place, as editors and Kubernetes do it."""
  part = path.with_name("part")
  part.unlink(missing_ok=True)
  with open(os.open(part, os.O_WRONLY | os.O_CREAT, mode), "wb") as file:
    file.write(text.encode() if isinstance(text, str) else text)
    os.fchmod(file.fileno(), mode)
  part.replace(path)
  return path


@pytest.fixture
def path(tmp_path):
  named = f"# who is who\n{KEYS[0]} team-a\n\n  {KEYS[1]}\tteam-b   # the other one\r\n"
  return write(tmp_path / "keys", f"{named}{KEYS[2]}\n{KEYS[3]}#x\n{KEYS[4]} team-a")


def test_each_key_has_its_tenant(path):
  keys = ApiKeys(path)
  assert len(keys._tenants) == 5
  assert [keys.accepts(KEYS[index]) for index in (0, 1, 4)] == ["team-a", "team-b", "team-a"]
  unnamed = [keys.accepts(KEYS[2]), keys.accepts(KEYS[3])]
  assert len(set(unnamed)) == 2 and all(name.startswith("key-") and len(name) == 12 for name in unnamed)
  assert ApiKeys(str(path)).accepts(KEYS[2]) == unnamed[0], "the same after a restart"


def test_headers(path):
  keys = ApiKeys(path)
  for value in (f"Bearer {KEYS[0]}", f"bearer {KEYS[0]}", f"BEARER  {KEYS[0]} ", KEYS[0]):
    assert keys.accepts(value) == "team-a", value
  for value in (
    None,
    "",
    "Bearer",
    "Bearer ",
    "Basic " + KEYS[0],
    KEYS[0][:-1],
    KEYS[0] + "x",
    KEYS[0].upper(),
    f"{KEYS[0]} team-a",
    "team-a",
    "# who is who",
    "é" * 30,
    "\udcff",
    "x" * 1_000_000,
  ):
    assert keys.accepts(value) is None, value
  assert keys.check_credentials("Basic x", KEYS[1]) == "team-b"
  assert keys.check_credentials(f"Bearer {KEYS[0]}", None) == "team-a"
  with pytest.raises(Unauthenticated, match="API key is missing; send it as `authorization: Bearer KEY`"):
    keys.check_credentials(None, None)
  with pytest.raises(Unauthenticated, match="API key is not known here; check the key") as caught:
    keys.check_credentials("Bearer wrong", "wrong")
  assert "wrong" not in str(caught.value)


@pytest.mark.catalogue("H5")
@pytest.mark.parametrize("presented", [*KEYS, "wrong", KEYS[0][:-1]])
def test_every_key_is_compared_whatever_was_presented(path, monkeypatch, presented):
  keys = ApiKeys(path)
  compared = []
  monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
  keys.accepts(presented)
  assert len(compared) == len(KEYS)
  assert {len(digest) for pair in compared for digest in pair} == {32}, "digests of one length, never keys"


@pytest.mark.catalogue("H5")
@pytest.mark.parametrize("presented", ["wrong", KEYS[0][:-1], KEYS[0], ADMIN])
def test_for_an_admin_every_key_of_both_files_is_compared(path, tmp_path, monkeypatch, presented):
  keys = AdminKeys(ApiKeys(write(tmp_path / "admin_keys", f"{ADMIN}\nanother-key-of-an-admin\n")), ApiKeys(path))
  compared = []
  monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
  with contextlib.suppress(Unauthenticated, PermissionDenied):
    keys.check_credentials(presented, None)
  assert len(compared) == len(KEYS) + 2
  assert {len(digest) for pair in compared for digest in pair} == {32}


_T = 2.576  # p = 0.01


def leakage(check: Callable[[str], object], seed: int) -> float:
  """Welch's t between the times that guesses take whose first character alone is right, and all but the last two.

  Over 100,000 of them, each made just before it is timed and of pieces of the same sizes, so that nothing else differs:
  what was freed a moment ago is seen, too. The slowest tenth is noise.
  """
  rng, size = random.Random(seed), len(KEYS[0])
  begun = (KEYS[0][0] + "x" * (size - 3), KEYS[0][: size - 2])
  times: tuple[list[int], list[int]] = ([], [])
  for _ in range(100_000):
    kind = rng.randrange(2)
    guess = begun[kind] + "".join(rng.choices("abcdefgh", k=2))
    started = time.perf_counter_ns()
    check(guess)
    times[kind].append(time.perf_counter_ns() - started)
  most = statistics.quantiles(times[0] + times[1], n=10)[-1]
  far, near = ([each for each in several if each <= most] for several in times)
  spread = statistics.variance(far) / len(far) + statistics.variance(near) / len(near)
  return (statistics.fmean(near) - statistics.fmean(far)) / math.sqrt(spread)


@pytest.mark.long
@pytest.mark.catalogue("H5")
def test_time_tells_nothing_about_how_much_of_a_key_is_right(path, tmp_path):
  """Equal times have p < 0.01, which is |t| > 2.58, in one run of a hundred and in three of three once in a million.

  A comparison that stops at the first wrong character is found so.
  """
  keys = ApiKeys(path)
  admins = AdminKeys(ApiKeys(write(tmp_path / "admin_keys", ADMIN)), keys)

  def stops_early(guess: str) -> bool:
    return all(given == wanted for given, wanted in zip(guess, KEYS[0], strict=True))

  def refused(guess: str) -> None:
    with contextlib.suppress(Unauthenticated):
      admins.check_credentials(guess, None)

  assert min(leakage(stops_early, seed) for seed in (1, 2, 3)) > _T
  for check in (keys.accepts, refused):
    found = [abs(leakage(check, seed)) for seed in (1, 2, 3)]
    assert min(found) < _T, (check, found)


REFUSED = {
  "empty": ("", "has no key, so nobody could call; write one key a line"),
  "comments only": ("# nothing\n\n   # here\n", "has no key"),
  "short": (f"{KEYS[0]}\nhunter2\n", "line 2 has a key of 7 characters, the least is 16; make one with: openssl"),
  "three words": (f"{KEYS[0]} team a\n", "line 1 is not `KEY` or `KEY TENANT`"),
  "tenant": (f"{KEYS[0]} team/a\n", "line 1 is not `KEY` or `KEY TENANT`"),
  "not ASCII": (f"{KEYS[0]}é\n", "line 1 is not `KEY`"),
  "binary": (bytes(range(256)), "is not `KEY`"),
  "twice": (f"{KEYS[0]} a\n{KEYS[1]}\n{KEYS[0]} b\n", "line 3 repeats an earlier key"),
  "too large": (b"#" * (MAX_FILE_BYTES + 1), f"has more than {MAX_FILE_BYTES} bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused_in_one_line_that_tells_no_key(tmp_path, name):
  text, said = REFUSED[name]
  path = write(tmp_path / "keys", text)
  with pytest.raises(ConfigError) as caught:
    ApiKeys(path)
  message = str(caught.value)
  assert said in message and message.startswith(f"api_key_file={path}") and len(message.splitlines()) == 1
  assert not any(key in message for key in (*KEYS, "hunter2"))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o777])
def test_a_file_open_to_every_user_is_refused(tmp_path, mode):
  path = write(tmp_path / "keys", KEYS[0], mode)
  with pytest.raises(ConfigError, match=f"has mode {mode:04o}, which opens it to every user .*; chmod 600"):
    ApiKeys(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_owner_and_group_may_read(tmp_path, mode):
  assert ApiKeys(write(tmp_path / "keys", KEYS[0], mode)).accepts(KEYS[0])


def test_what_is_no_file_is_refused(tmp_path):
  for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "not a regular file|Is a directory")):
    with pytest.raises(ConfigError, match=said):
      ApiKeys(path)
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe, 0o600)
  with pytest.raises(ConfigError, match="not a regular file"):
    ApiKeys(pipe)  # and does not wait for a writer


def test_a_changed_file_is_read_again(path, caplog):
  keys = ApiKeys(path)
  write(path, f"{KEYS[1]} team-b\nthe-new-key-of-the-file team-c\n")
  assert keys.accepts("the-new-key-of-the-file") == "team-c"
  assert keys.accepts(KEYS[0]) is None, "a key that was taken out is out at once"
  path.write_text(path.read_text() + f"{KEYS[0]} back\n")
  assert keys.accepts(KEYS[0]) == "back", "also when it is written in place"
  assert not any(key in caplog.text for key in (*KEYS, "the-new-key"))


def test_a_bad_new_file_leaves_the_keys_as_they_were(path, caplog):
  keys = ApiKeys(path)

  def spoil():
    write(path, "short")

  def open_to_all():
    write(path, KEYS[1], 0o644)

  def remove():
    path.unlink()

  for spoiled, said in ((spoil, "has a key of 5"), (open_to_all, "has mode 0644"), (remove, "No such file")):
    caplog.clear()
    spoiled()
    for _ in range(3):
      assert keys.accepts(KEYS[0]) == "team-a"
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1 and said in errors[0].getMessage() and "stay as they were" in errors[0].getMessage()
  write(path, f"{KEYS[3]} late\n")
  assert keys.accepts(KEYS[3]) == "late" and keys.accepts(KEYS[0]) is None


@pytest.mark.catalogue("H6")
def test_nothing_shows_a_key(path):
  keys = ApiKeys(path)
  shown = repr(keys) + repr(vars(keys))
  assert not any(key in shown for key in KEYS)


def test_whose_request_it_is():
  assert bind_tenant("mine", None) == "mine" and bind_tenant("", None) == ""
  assert bind_tenant("", "team-a") == "team-a" == bind_tenant("team-a", "team-a")
  with pytest.raises(PermissionDenied, match="tenant='team-b' is not that of this API key; leave it empty"):
    bind_tenant("team-b", "team-a")
