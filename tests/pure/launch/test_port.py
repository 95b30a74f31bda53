"""The store's socket: free by default, on loopback, and a clear word about one that is taken."""

from __future__ import annotations

import os
import socket

import pytest

from phalanx.errors import InputError
from phalanx.launch.port import listen


def test_free_ports_on_loopback():
    with listen(None) as one, listen(None) as two:
        assert one.getsockname()[0] == two.getsockname()[0] == "127.0.0.1"
        assert one.getsockname()[1] != two.getsockname()[1]


def test_taken_port_names_its_holder():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=rf"port {port} is in use by process {os.getpid()} (.|\n)*MASTER_PORT"):
            listen(str(port))
    with listen(str(port)) as listener:
        assert listener.getsockname()[1] == port


@pytest.mark.parametrize("text", ["", "http", "-1", "65536", "0"])
def test_what_is_not_a_port(text: str):
    with pytest.raises(InputError, match=f"'{text}' is not a port"):
        listen(text)
