"""Several hosts on one machine: network namespaces joined by a switch, fast inside, as slow between as one asks for.

    with hosts(2, bits_per_s=100e6) as network:
        …                       # in a process forked for it:
        network.enter(0)        # now on the first host, with a loopback device and an address of its own

Processes of one such host share its loopback and its abstract sockets, so that ranks there talk through shared memory;
to ranks elsewhere they have only the network, as between real machines. The namespaces have no names: they are gone
when the last process in them has ended, even by SIGKILL. Needs root, `ip` and `tc`; Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_LIBC = ctypes.CDLL(None, use_errno=True)
_SMALLEST_BURST_BYTES = 64 * 1024  # one packet as the kernel hands it to a device that cuts packets itself
_QUEUE_S = 0.05  # what a sender may have waiting before packets are dropped

MASTER_PORT = 29500
"""Each host's ports are its own, so that a fixed one does."""


class Hosts:
    """`addresses[host]` is the IPv4 address of each on the network between them; made by `hosts`."""

    def __init__(self, namespaces: list[int], addresses: list[str]) -> None:
        self._namespaces, self.addresses = namespaces, addresses

    def enter(self, host: int) -> None:
        """Move the calling thread, and what it starts from now on, to a host. Do it first thing in a process."""
        _call("setns", self._namespaces[host], _CLONE_NEWNET)

    def environ(self, rank: int, num_ranks: int) -> dict[str, str]:
        """What torchrun would tell rank `rank` of `num_ranks`, dealt out to the hosts in order, evenly."""
        per_host = num_ranks // len(self.addresses)
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.addresses[0],
            "MASTER_PORT": str(MASTER_PORT),
        }

    def become(self, rank: int, num_ranks: int) -> None:
        """Make the calling process rank `rank`: on its host, with the environment of `environ`."""
        self.enter(rank * len(self.addresses) // num_ranks)
        os.environ.update(self.environ(rank, num_ranks))


def why_not() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} on the path"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with hosts(2, bits_per_s=1e9):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces cannot be made here: {said.strip()}"


@contextlib.contextmanager
def hosts(num_hosts: int, *, bits_per_s: float) -> Iterator[Hosts]:
    """Make `num_hosts` hosts, each with a link of `bits_per_s` in either direction to the switch between them.

    Raises subprocess.CalledProcessError, with the reason in `stderr`, where `ip` or `tc` fail.
    """
    with contextlib.ExitStack() as stack:
        switch, *namespaces = [_new_namespace(stack) for _ in range(1 + num_hosts)]
        addresses = [f"10.77.0.{1 + host}" for host in range(num_hosts)]
        burst = max(_SMALLEST_BURST_BYTES, int(bits_per_s / 8 * 0.001))
        shape = f"root tbf rate {bits_per_s:.0f}bit burst {burst} latency {_QUEUE_S * 1000:.0f}ms"
        _run_in(switch, "ip link add switch type bridge", "ip link set switch up")
        for host, namespace in enumerate(namespaces):
            port = f"port{host}"
            _run_in(
                namespace,
                "ip link set lo up",
                f"ip link add network type veth peer name {port} netns /proc/{os.getpid()}/fd/{switch}",
                f"ip address add {addresses[host]}/24 dev network",
                "ip link set network up",
                f"tc qdisc add dev network {shape}",
            )
            _run_in(
                switch,
                f"ip link set {port} master switch up",
                f"tc qdisc add dev {port} {shape}",
            )
        yield Hosts(namespaces, addresses)


def _new_namespace(stack: contextlib.ExitStack) -> int:
    """A descriptor of a new network namespace, which lives as long as that or a process in it."""

    def make() -> int:
        _call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    namespace = _in_thread(make)
    stack.callback(os.close, namespace)
    return namespace


def _run_in(namespace: int, *commands: str) -> None:
    def run() -> None:
        _call("setns", namespace, _CLONE_NEWNET)
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)

    _in_thread(run)


def _in_thread(function: Callable[[], Any]) -> Any:
    """Call it in a thread of its own, which may change its namespace: the process keeps its own."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def _call(name: str, *arguments: int) -> None:
    if getattr(_LIBC, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
