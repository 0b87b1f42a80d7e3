"""A server to measure: one that runs already, or one that is started for the measurement."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import yaml


@contextlib.contextmanager
def running_server(
    url: str | None, config: Path, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The base URL of ours; without `url`, `config` is served and stopped again afterwards.

    `environment` is added to ours. Raises RuntimeError with the end of the log if it does not come up.
    """
    if url is not None:
        yield url.rstrip("/")
        return
    options = yaml.safe_load(config.read_text()).get("http_options") or {}
    host = options.get("host", "127.0.0.1")
    base = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"
    serve = Path(sys.executable).with_name("serve")
    with started([str(serve), "run", str(config)], base, log, environment):
        yield base


@contextlib.contextmanager
def started(
    argv: Sequence[str], base: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A server of anybody's that answers /health at `base`, stopped again afterwards.

    `environment` is added to ours.

    Raises RuntimeError with the end of the log if it does not come up in three minutes.
    """
    with log.open("w") as stream:
        process = subprocess.Popen(
            argv,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        try:
            if not until_well(base, 180, lambda: process.poll() is None):
                raise RuntimeError(f"the server did not come up:\n{log.read_text()[-3000:]}")
            yield
        finally:
            # Started in the background it would not hear Ctrl-C. It ends the processes that it started.
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def until_well(base: str, seconds: float, running: Callable[[], bool] = lambda: True) -> bool:
    """Wait until a server answers /health; whether it did so in time, while it was running."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and running():
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{base}/health", timeout=10).status_code == httpx.codes.OK:
                return True
        time.sleep(0.5)
    return False
