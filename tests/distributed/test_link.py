"""Connections between the controller and workers: whole blobs in order, and strangers are not listened to."""

import asyncio
import socket
import threading
from contextlib import suppress

import pytest

from rollart.distributed import link
from rollart.distributed.link import Caller, Exchange, Frames, Line, frame

HOST = "127.0.0.1"
BLOBS = [b"", b"one", bytes(range(256)) * 5000, b"last"]


def on_loop(test):
    async def main():
        exchange = Exchange(HOST)
        try:
            async with asyncio.timeout(100):
                await test(exchange)
        finally:
            await exchange.close()

    asyncio.run(main())


def expected(exchange):
    heard = []
    caller = Caller(heard.append)
    exchange.expect(caller)
    return caller, heard


async def connected(exchange):
    caller, heard = expected(exchange)
    line = await asyncio.to_thread(Line, exchange.address, caller.secret)
    await until(lambda: caller.there)
    return caller, heard, line


async def until(condition):
    while not condition():  # noqa: ASYNC110 - what it looks at tells nobody
        await asyncio.sleep(0.005)


def read_to_the_end(connection):
    """Until the other side hangs up, politely or not."""
    with connection, suppress(ConnectionError):
        while connection.recv(1000):
            pass


def talk_to_nobody(line):
    for _ in range(100):
        line.say(BLOBS[2])


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1000, 10**7])
def test_blobs_are_whole_however_the_bytes_come(size):
    frames, stream = Frames(), b"".join(map(frame, BLOBS))
    assert [blob for at in range(0, len(stream), size) for blob in frames.feed(stream[at : at + size])] == BLOBS


def test_both_say_and_hear():
    async def test(exchange):
        caller, heard = expected(exchange)
        caller.say(BLOBS[0])  # before it called
        line = await asyncio.to_thread(Line, exchange.address, caller.secret)
        await until(lambda: caller.there)
        for blob in BLOBS[1:]:
            caller.say(blob)
        listening = line.listen()
        assert [await asyncio.to_thread(next, listening) for _ in BLOBS] == BLOBS
        for blob in BLOBS:
            await asyncio.to_thread(line.say, blob)
        await until(lambda: len(heard) == len(BLOBS))
        assert heard == BLOBS
        caller.hang_up()
        assert await asyncio.to_thread(lambda: list(listening)) == []
        with pytest.raises(OSError):  # noqa: PT011 - reset or broken pipe
            await asyncio.to_thread(talk_to_nobody, line)

    on_loop(test)


def test_over_comes_after_the_last_blob():
    async def test(exchange):
        caller, heard = expected(exchange)
        caller.over.add_done_callback(lambda _: heard.append("over"))

        def speak():
            line = Line(exchange.address, caller.secret)
            for blob in BLOBS:
                line.say(blob)
            line._socket.close()

        thread = threading.Thread(target=speak)
        thread.start()
        await caller.over
        await until(lambda: heard[-1] == "over")
        assert heard == [*BLOBS, "over"]
        thread.join()

    on_loop(test)


def test_half_a_blob_is_not_heard():
    async def test(exchange):
        caller, heard = expected(exchange)
        with socket.create_connection(exchange.address) as half:
            half.sendall(caller.secret + frame(b"whole") + frame(b"half")[:-1])
        await caller.over
        assert heard == [b"whole"]

    on_loop(test)


@pytest.mark.parametrize("name", [b"x" * 32, b"y" * 5000])
def test_a_stranger_is_not_listened_to(name, caplog):
    async def test(exchange):
        _, heard = expected(exchange)
        stranger = socket.create_connection(exchange.address)
        stranger.sendall(name + frame(b"hello"))
        await asyncio.to_thread(read_to_the_end, stranger)
        assert heard == []
        assert "not from a worker of this run" in caplog.text

    on_loop(test)


def test_a_secret_is_good_for_one_call():
    async def test(exchange):
        caller, heard, first = await connected(exchange)
        second = await asyncio.to_thread(Line, exchange.address, caller.secret)
        assert await asyncio.to_thread(lambda: list(second.listen())) == []
        first.say(b"still here")
        await until(lambda: heard)
        assert heard == [b"still here"]

    on_loop(test)


def test_who_does_not_say_who_it_is_is_cut_off(monkeypatch):
    monkeypatch.setattr(link, "INTRODUCTION_S", 0.05)

    async def test(exchange):
        silent = socket.create_connection(exchange.address)
        silent.sendall(b"half a name")
        await asyncio.to_thread(read_to_the_end, silent)

    on_loop(test)


def test_who_is_forgotten_is_cut_off():
    async def test(exchange):
        caller, _, line = await connected(exchange)
        exchange.forget(caller)
        assert await asyncio.to_thread(lambda: list(line.listen())) == []
        await caller.over

    on_loop(test)
