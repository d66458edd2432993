"""Whatever the link does, both sides take every item exactly once and in order."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from rollart.ports.channel import Endpoint, Packet


def side(now: float = 0.0) -> Endpoint[int, int]:
    return Endpoint(resend_s=1.0, silent_s=10.0, now=now)


def test_a_packet_carries_what_is_new_and_is_not_repeated_before_its_time() -> None:
    a = side()
    a.send([1, 2], 0.0)
    assert a.packet(0.0) == Packet(0, (1, 2), 0)
    assert a.packet(0.999) is None
    assert a.next_wake() == 1.0
    assert a.packet(1.0) == Packet(0, (1, 2), 0)
    assert a.packet(1.999) is None


def test_new_items_travel_at_once_with_what_is_unacknowledged() -> None:
    a = side()
    a.send([1], 0.0)
    a.packet(0.0)
    a.send((2,), 0.5)
    assert a.packet(0.5) == Packet(0, (1, 2), 0)


def test_items_are_taken_once_and_acknowledged() -> None:
    a, b = side(), side()
    a.send([1, 2], 0.0)
    packet = a.packet(0.0)
    assert packet is not None
    assert b.receive(packet, 0.1) == [1, 2]
    assert b.receive(packet, 0.2) == []
    answer = b.packet(0.2)
    assert answer == Packet(0, (), 2)
    assert b.packet(0.3) is None
    assert a.receive(answer, 0.3) == []
    assert a.next_wake() is None
    assert a.packet(99.0) is None


def test_a_mere_acknowledgement_is_not_acknowledged() -> None:
    a, b = side(), side()
    a.send([1], 0.0)
    b.receive(a.packet(0.0) or Packet(0, (), 0), 0.0)
    a.receive(b.packet(0.0) or Packet(0, (), 0), 0.0)
    assert a.packet(5.0) is None


def test_a_packet_after_a_gap_gives_nothing_until_the_gap_is_filled() -> None:
    b = side()
    assert b.receive(Packet(2, (3,), 0), 0.0) == []
    assert b.receive(Packet(0, (1, 2, 3), 0), 0.0) == [1, 2, 3]
    assert b.receive(Packet(2, (3, 4), 0), 0.0) == [4]


def test_an_old_acknowledgement_changes_nothing() -> None:
    a = side()
    a.send([1, 2], 0.0)
    a.packet(0.0)
    a.receive(Packet(0, (), 2), 0.1)
    a.send([3], 0.2)
    a.receive(Packet(0, (), 1), 0.3)
    assert a.packet(0.3) == Packet(2, (3,), 0)


def test_a_partial_acknowledgement_leaves_the_rest_due() -> None:
    a = side()
    a.send([1, 2, 3], 0.0)
    a.packet(0.0)
    a.receive(Packet(0, (), 2), 0.1)
    assert a.packet(0.5) is None
    assert a.packet(1.0) == Packet(2, (3,), 0)


def test_silence_counts_from_when_an_answer_is_due() -> None:
    a = side()
    assert not a.dead(1e9)
    a.send([1], 100.0)
    a.packet(100.0)
    assert not a.dead(109.999)
    assert a.dead(110.0)
    a.receive(Packet(0, (), 0), 109.0)
    assert not a.dead(118.999)
    assert a.dead(119.0)
    a.receive(Packet(0, (), 1), 119.0)
    assert not a.dead(1e9)


def test_the_next_wake_is_the_earlier_of_resending_and_giving_up() -> None:
    a = Endpoint[int, int](resend_s=6.0, silent_s=10.0, now=0.0)
    a.send([1], 0.0)
    a.packet(0.0)
    assert a.next_wake() == 6.0
    a.packet(6.0)
    assert a.next_wake() == 10.0


FATES = st.lists(st.sampled_from(["lost", "once", "twice", "late"]), max_size=60)


@given(FATES, st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=25))
def test_every_item_arrives_once_in_order_over_any_link(fates: list[str], sends: list[tuple[bool, int]]) -> None:
    ends = (side(), side())
    sent: tuple[list[int], list[int]] = ([], [])
    received: tuple[list[int], list[int]] = ([], [])
    flight: list[tuple[float, int, int, Packet[int]]] = []
    count = 0

    def transmit(now: float) -> None:
        nonlocal count
        for index in (0, 1):
            packet = ends[index].packet(now)
            if packet is not None:
                fate = fates[count] if count < len(fates) else "once"
                count += 1
                delays = {"lost": [], "once": [0.1], "twice": [0.1, 2.3], "late": [1.7]}[fate]
                for delay in delays:
                    heapq.heappush(flight, (now + delay, len(flight) + 1000 * count, 1 - index, packet))

    now = 0.0
    for step in range(400):
        if step < len(sends):
            first, amount = sends[step]
            new = list(range(len(sent[first]), len(sent[first]) + amount))
            sent[first].extend(new)
            ends[first].send(new, now)
        while flight and flight[0][0] <= now:
            _, _, to, packet = heapq.heappop(flight)
            received[to].extend(ends[to].receive(packet, now))
        transmit(now)
        now += 0.25
    assert received[1] == sent[0]
    assert received[0] == sent[1]
    assert ends[0].next_wake() is None
    assert ends[1].next_wake() is None
