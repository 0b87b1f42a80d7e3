"""A server to measure: one that runs already, or one that is started for the measurement."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
            _wait(base, process, log)
            yield
        finally:
            # Started in the background it would not hear Ctrl-C. It ends the processes that it started.
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _wait(base: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{base}/health").status_code == httpx.codes.OK:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-3000:]}")
