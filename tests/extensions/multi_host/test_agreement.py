"""A leader and followers agree during a start, over real sockets, without a device."""

from concurrent.futures import ThreadPoolExecutor
import pathlib

import pytest

from engine.errors import ConfigError
from extensions.multi_host.cluster_place import ClusterPlace
from extensions.multi_host.follower import Follower
from extensions.multi_host.host_facts import collect_facts
from extensions.multi_host.leader import Leader
from server.host_options import ClusterSettings
from tools.server_process import find_free_port

SECRET = b"s" * 32
SETTINGS = ClusterSettings(num_hosts=3, cluster_secret_file="unused", host_start_timeout_s=30)


@pytest.fixture
def hosts(tmp_path: pathlib.Path):
  """A leader and two followers that have met."""
  port, lost = find_free_port(), []
  places = [ClusterPlace("127.0.0.1", port, 3, host, False) for host in range(3)]
  leader = Leader(places[0], SETTINGS, SECRET, tmp_path, lambda line: None, lost.append, lambda: None)
  followers = [Follower(place, SETTINGS, SECRET, lost.append, lambda: None) for place in places[1:]]
  facts = collect_facts(tmp_path, 3, {})
  with ThreadPoolExecutor(3) as pool:
    meetings = [pool.submit(leader.gather_hosts, {})]
    meetings += [pool.submit(follower.join_cluster, facts) for follower in followers]
    for meeting in meetings:
      meeting.result()
    yield pool, leader, followers
  leader._end()
  for follower in followers:
    _disconnect(follower)
  for channel in leader._gathering.found.values():
    channel.close()


def _disconnect(follower: Follower) -> None:
  follower._ended.set()
  follower._pulse.stop_beating()
  for channel in follower._channels or ():
    channel.close()


def test_the_host_with_the_least_memory_decides_the_pool(hosts):
  pool, leader, followers = hosts
  own = [
    pool.submit(each.agree_on_blocks, blocks) for each, blocks in zip((leader, *followers), (90, 70, 80), strict=True)
  ]
  assert [each.result() for each in own] == [70, 70, 70]


def test_hosts_that_have_built_the_same_go_on(hosts):
  pool, leader, followers = hosts
  for each in [pool.submit(each.agree_on_built, {"programs": "a"}) for each in (leader, *followers)]:
    each.result()


def test_hosts_that_have_built_different_things_name_them(hosts):
  pool, leader, followers = hosts
  built = [{"--block_size": "16"}, {"--block_size": "16"}, {"--block_size": "32"}]
  waits = [pool.submit(each.agree_on_built, facts) for each, facts in zip((leader, *followers), built, strict=True)]
  for wait in waits:
    with pytest.raises(ConfigError, match="host 2 has --block_size 32, host 0 16"):
      wait.result()


def test_a_follower_that_fails_says_why(hosts):
  pool, leader, followers = hosts
  wait = pool.submit(leader.agree_on_blocks, 90)
  followers[1].report_fault("the disk is full")
  _disconnect(followers[1])
  followers[0]._steps.send_frame(3, b"70")
  with pytest.raises(ConfigError, match="host 2 is lost: host 2 ends: the disk is full"):
    wait.result()
