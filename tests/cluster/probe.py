"""A stranger on a network: tries ports without the token. `probe.py <settings as JSON>`, prints what it found as JSON.

    {"connect": [[host, port], …]}              whether anything answers: {"host port": bool}
    {"grpc": [host, port], "methods": […]}      gRPC status of each method: {method: status}; see `STATUS`
    {"http": [host, port], "path": "/…"}        HTTP status of an empty POST
    {"link": [host, port]}                      whether a link closes after a hello and an answer with wrong proofs

gRPC is spoken by hand (one request per connection, literal headers), because the project does not depend on grpcio.
"""

import http.client
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

PATIENCE_S = 5.0
STATUS = {0: "OK", 12: "UNIMPLEMENTED", 16: "UNAUTHENTICATED"}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
EMPTY_MESSAGE = bytes(5)
NODE_ID = "ab" * 28
"""Sent with every call. Without it Ray 2.60 aborts in StartSync, of the GCS and of raylets, before it asks for the
token (`ray_syncer_server.cc:30`): only a network without strangers helps against that."""


def answers(host, port):
    with suppress(OSError), socket.create_connection((host, port), timeout=PATIENCE_S):
        return True
    return False


def frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def call(host, port, method, token=""):
    """The gRPC status of a call with an empty message; None if there is none in time, -1 if the server hangs up."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", method), (":authority", host), ("te", "trailers")]
    headers += [("content-type", "application/grpc"), ("node_id", NODE_ID)]
    if token:
        headers.append(("authorization", f"Bearer {token}"))
    block = b"".join(b"\0" + _pair(*part) for part in headers)
    request = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS, 1, block)
    request += frame(DATA, END_STREAM, 1, EMPTY_MESSAGE)
    received = b""
    with suppress(TimeoutError), socket.create_connection((host, port), timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        while (status := _status(received)) is None:
            data = connection.recv(65536)
            if not data:
                return -1
            received += data
        return status
    return None


def _pair(name, value):
    return bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


def _status(received):
    """The first header of this connection with the status is literal."""
    _, found, rest = received.partition(b"grpc-status")
    if not found or len(rest) < 1 or len(rest) < 1 + rest[0]:
        return None
    return int(rest[1 : 1 + rest[0]])


def post(host, port, path):
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    connection.request("POST", path, b"")
    return connection.getresponse().status


def link_closes(host, port):
    """Whether it hangs up after a hello of an unknown worker and a wrong proof, and sends nothing but its challenge."""
    with socket.create_connection((host, port), timeout=PATIENCE_S) as link:
        link.sendall(os.urandom(48))
        challenge = link.recv(1000)
        link.sendall(os.urandom(32))
        try:
            return len(challenge) == 64 and link.recv(1000) == b""
        except ConnectionResetError:
            return True


def main(wanted):
    with ThreadPoolExecutor(8) as threads:
        if "connect" in wanted:
            found = threads.map(lambda address: answers(*address), wanted["connect"])
            return {f"{host} {port}": yes for (host, port), yes in zip(wanted["connect"], found, strict=True)}
        if "grpc" in wanted:
            methods = wanted["methods"]
            found = threads.map(lambda method: call(*wanted["grpc"], method, wanted.get("token", "")), methods)
            return dict(zip(methods, found, strict=True))
        if "http" in wanted:
            return {"status": post(*wanted["http"], wanted["path"])}
        return {"closes": link_closes(*wanted["link"])}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))  # noqa: T201
