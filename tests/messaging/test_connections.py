"""Connections of a listening socket leave half of the process's open files to others."""

import logging
import socket
from contextlib import ExitStack

import pytest
import zmq

from asyncrl.messaging.sockets import ConnectionGuard, bind_router
from asyncrl.observability import metrics_system as m
from asyncrl.observability import waits
from support.sockets import connect_dealer
from support.waiting import wait_for
from support.weights import PATIENCE


@pytest.mark.timeout(60)
def test_of_too_many_connections_the_oldest_silent_one_goes_and_those_that_speak_stay(
    counted: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = bind_router(context, "tcp://127.0.0.1:0")
    guard = ConnectionGuard(server, connections=20)
    endpoint = server.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    honest = connect_dealer(context, endpoint, b"honest")
    honest.send(b"0")
    name, _ = server.recv_multipart(copy=False)
    guard.note(name)
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    with ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
            for _ in range(60)
        ]
        wait_for(lambda: guard.disconnected == 41)
        for peer in silent[:41]:
            while peer.recv(100):  # libzmq's greeting, then the end.
                pass
        honest.send(b"1")
        assert server.recv_multipart() == [b"honest", b"1"]
        late = connect_dealer(context, endpoint, b"late")
        late.send(b"2")
        assert server.recv_multipart() == [b"late", b"2"]
    assert waits.wait_metrics()[m.DISCONNECTED] >= 41
    assert "ulimit -n" in caplog.text
    guard.close()
    context.destroy(0)
