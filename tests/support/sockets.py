"""A bare peer of a server."""

import zmq

from asyncrl.messaging.keys import ClientKeys
from asyncrl.messaging.sockets import open_dealer


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    identity: bytes,
    security: ClientKeys | None = None,
) -> zmq.Socket[bytes]:
    socket = open_dealer(context, endpoint, identity, security)
    socket.connect(endpoint)
    return socket
