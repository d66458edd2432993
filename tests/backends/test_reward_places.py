"""The same reward functions, unchanged, in every place where they may run: the same rewards."""

from contextlib import ExitStack

import pytest
from parts import RewardDriver
from replayed import MATH, TEXT, episodes, scores
from reward_server import RewardServer

from rollart.backends.rewards.host import RewardHost
from rollart.backends.rewards.remote_host import RemoteHost
from rollart.backends.rewards.replica_host import ReplicaHost


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def in_place(stack, place, function):
    if place == "url":
        server = stack.enter_context(RewardServer(function))
        driver = RewardDriver(RemoteHost, {"url": server.url, "function": function})
    else:
        driver = RewardDriver(RewardHost if place == "threads" else ReplicaHost, {"function": function, "slots": 2})
    stack.callback(driver.worker.close)
    return driver


def same_everywhere(stack, number):
    records = episodes(number)
    for function in (MATH, TEXT):
        found = {
            place: scores(in_place(stack, place, function), records, "r") for place in ("threads", "processes", "url")
        }
        assert found["threads"] == found["processes"] == found["url"]
        values = {answer.values[0] for answer in found["threads"]}
        assert len(values) > 1, "the players are all alike"


def test_a_reward_is_the_same_in_threads_in_processes_and_behind_a_url(stack):
    same_everywhere(stack, 60)


@pytest.mark.long
def test_a_thousand_transcripts_get_the_same_rewards_everywhere(stack):
    same_everywhere(stack, 1000)
