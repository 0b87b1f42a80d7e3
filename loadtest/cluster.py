"""A Ray cluster of this machine's own, to which configs are deployed as they are to any other.

Nodes are started with `ray start`, in this process's network or each in a network namespace of its own behind
a bridge. Only what was started here ends with it.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from loadtest.wire import Carried, wire

START_SECONDS = 120
DEPLOY_SECONDS = 240
LOOPBACK = "127.0.0.1"
STARTED = "Ray runtime started."
EXPORT_SECONDS = 1.0
"""How old what /metrics shows may be; Ray's own default is ten seconds."""

SUBNET = "10.77.0"
BRIDGE = "slipbr"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node's processes run: an address, and a network namespace unless it is this process's own.

    `labels` are Ray's, as `ray start` takes them.
    """

    ip: str
    namespace: str = ""
    labels: str = ""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What a command begins with to run there."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()

    def link(self, state: str) -> None:
        """Plug its cable in or out: "up" or "down"."""
        _ip("link", "set", self.cable, state)

    @contextlib.contextmanager
    def far(self, delay_s: float, loss: float, seed: int) -> Iterator[Carried]:
        """Far away for the length of the block: every frame from and to it is late, some are lost."""
        _ip("link", "set", self.cable, "nomaster")
        try:
            with wire((self.cable, self.detour[0]), delay_s, loss, seed) as carried:
                yield carried
        finally:
            _ip("link", "set", self.cable, "master", BRIDGE)

    @property
    def cable(self) -> str:
        """The outer end of its cable, in the bridge."""
        return f"{self.namespace}-v"

    @property
    def detour(self) -> tuple[str, str]:
        """Another way into the bridge, for frames that a wire carries: its outer and its inner end."""
        return f"{self.namespace}-o", f"{self.namespace}-i"


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Place]]:
    """So many namespaces behind a bridge. Needs root. Raises RuntimeError if the system refuses."""
    places = [Place(f"{SUBNET}.{n + 2}", f"slip{n}") for n in range(count)]
    with contextlib.ExitStack() as stack:

        def undo(*command: str) -> None:
            stack.callback(subprocess.run, ["ip", *command], capture_output=True, check=False)

        _ip("link", "add", BRIDGE, "type", "bridge")
        undo("link", "del", BRIDGE)
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for place in places:
            name, cable, (outer, inner) = place.namespace, place.cable, place.detour
            _ip("netns", "add", name)
            undo("netns", "del", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            undo("link", "del", cable)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            undo("link", "del", outer)
            _ip("link", "set", inner, "master", BRIDGE, "up")
            # Outside the bridge the machine itself would answer for addresses behind it.
            _ip("link", "set", outer, "arp", "off", "up")
            _ip("link", "set", cable, "arp", "off", "master", BRIDGE, "up")
            for command in (
                ("link", "set", "lo", "up"),
                ("addr", "add", f"{place.ip}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("route", "add", "default", "via", f"{SUBNET}.1"),
            ):
                _ip("-n", name, *command)
        yield places


def _ip(*command: str) -> None:
    done = subprocess.run(["ip", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(command)}: {done.stderr.strip()}")


class Node:
    """One `ray start --block` and all that it started."""

    def __init__(self, place: Place, arguments: list[str], log: Path, token: str) -> None:
        self.place = place
        self._token = token
        self._arguments = arguments
        self._log = log
        self._process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start it, and wait until it has. Raises RuntimeError with the end of its log if it does not."""
        before = self._log.read_text().count(STARTED) if self._log.exists() else 0
        ray = str(Path(sys.executable).with_name("ray"))
        argv = [*self.place.prefix, ray, "start", "--block", "--disable-usage-stats"]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*argv, "--node-ip-address", self.place.ip, *self._arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(self._token),
            )
        deadline = time.monotonic() + START_SECONDS
        # One after the other: nodes that start at once on one machine get into each other's way.
        while self._log.read_text().count(STARTED) == before:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ray did not come up:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Its processes whose titles hold a text."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if title in " ".join(process.cmdline()):
                        found.append(process)
        return found

    def kill(self) -> None:
        """End all of it at once, as when a machine loses its power."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Cluster:
    """A head node and others.

    `dashboard` is the base URL of Ray's own HTTP interface, `token` what it asks for.
    """

    def __init__(self, dashboard: str, folder: Path, nodes: list[Node], token: str) -> None:
        self.dashboard = dashboard
        self.nodes = nodes
        self.token = token
        self._folder = folder

    def deploy(self, config: dict[str, Any]) -> None:
        """Make Serve what a config says, and wait until it is. Raises RuntimeError if it fails."""
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        serve = str(Path(sys.executable).with_name("serve"))
        argv = [serve, "deploy", str(path), "-a", self.dashboard]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env=_environment(self.token)
        )
        if done.returncode:
            raise RuntimeError(f"serve deploy failed:\n{done.stderr[-3000:]}")
        deadline = time.monotonic() + DEPLOY_SECONDS
        while not self.healthy():
            applications = self.applications()
            states = {name: app["status"] for name, app in applications.items()}
            if "DEPLOY_FAILED" in states.values() or time.monotonic() > deadline:
                said = {name: app["message"] for name, app in applications.items()}
                raise RuntimeError(f"applications are {states}: {said}")
            time.sleep(0.5)

    def healthy(self) -> bool:
        """Whether every deployment of every application has all its replicas."""
        applications = self.applications()
        return bool(applications) and all(
            application["status"] == "RUNNING"
            and all(d["status"] == "HEALTHY" for d in application["deployments"].values())
            for application in applications.values()
        )

    def applications(self) -> dict[str, Any]:
        """What Serve says of its applications, by name."""
        found: dict[str, Any] = _asked(self.dashboard, self.token).json()["applications"]
        return found

    def replicas(self, application: str, deployment: str) -> dict[str, int]:
        """Process ids of the running replicas of a deployment, by replica id."""
        found = self.applications()[application]["deployments"].get(deployment, {})
        return {
            replica["replica_id"]: replica["pid"]
            for replica in found.get("replicas", ())
            if replica["state"] == "RUNNING"
        }


@contextlib.contextmanager
def cluster(
    folder: Path, num_cpus: int, places: list[Place] | None = None, head_cpus: int | None = None
) -> Iterator[Cluster]:
    """A cluster with a node at each place, the head first; each claims to have so many processors.

    Logs go to `folder`.
    """
    places = places or [Place(LOOPBACK)]
    head, *others = places
    gcs, dashboard = (free_port(), free_port()) if not head.namespace else (6379, 8265)
    with contextlib.ExitStack() as stack:
        # Ray's sockets lie there, and their paths must be short.
        short = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="rc", ignore_cleanup_errors=True)
        )

        # Whoever reaches Ray can run code: nobody without this.
        token = secrets.token_hex(32)

        def node(place: Place, arguments: list[str], cpus: int, number: int) -> Node:
            log = folder / f"ray-{number}.log"
            labels = ["--labels", place.labels] if place.labels else []
            made = Node(place, [*arguments, *labels, "--num-cpus", str(cpus)], log, token)
            stack.callback(made.kill)
            made.start()
            return made

        first = node(
            head,
            [
                *("--head", "--port", str(gcs), "--temp-dir", short),
                *("--dashboard-host", head.ip, "--dashboard-port", str(dashboard)),
            ],
            num_cpus if head_cpus is None else head_cpus,
            0,
        )
        base = f"http://{head.ip}:{dashboard}"
        _wait(base, token)
        nodes = [first]
        for number, place in enumerate(others, 1):
            address = ["--address", f"{head.ip}:{gcs}"]
            nodes.append(node(place, address, num_cpus, number))
        yield Cluster(base, folder, nodes, token)


def _environment(token: str) -> dict[str, str]:
    return {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_metrics_report_interval_ms": str(int(1000 * EXPORT_SECONDS)),
    }


def _asked(base: str, token: str) -> httpx.Response:
    """What the dashboard says of Serve's applications."""
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.get(f"{base}/api/serve/applications/", headers=headers, timeout=30)


def _wait(base: str, token: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if _asked(base, token).status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise RuntimeError(f"Ray's dashboard does not answer at {base}")
