"""`/metrics`: the metrics of an application's own processes, on every node, as Ray's exporters show them."""

import asyncio
import re
from collections.abc import Collection, Iterable
from typing import Final

import aiohttp
import ray

NODE_SECONDS: Final = 3.0
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_OURS: Final = "ray_slipstream_"
_RAYS: Final = "ray_"
_SAMPLE: Final = re.compile(rf"{_OURS}\w+{{(?P<labels>.*)}} ")
_APPLICATION: Final = re.compile(r'application="([^"]*)"')
_RAYS_LABELS: Final = re.compile(
    r'(?:Component|NodeAddress|SessionName|Version|WorkerId|otel_scope_\w+)="[^"]*",?'
)
_PARTS: Final = re.compile(r"_(total|bucket|sum|count)$")


async def exposition(applications: Collection[str]) -> str:
    """Prometheus's text format of all that replicas of these applications have recorded.

    Values are as old as Ray's export interval. A node that does not answer is left out.
    """
    nodes = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    timeout = aiohttp.ClientTimeout(total=NODE_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        addresses = [(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in nodes]
        texts = await asyncio.gather(*(_scrape(http, *address) for address in addresses))
    return await asyncio.to_thread(merge, texts, applications)


async def _scrape(http: aiohttp.ClientSession, host: str, port: int) -> str:
    try:
        async with http.get(f"http://{host}:{port}/metrics") as answer:
            return await answer.text() if answer.ok else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""


def merge(texts: Iterable[str], applications: Collection[str]) -> str:
    """The families of ours in several expositions, as one, under their own names.

    Labels that Ray adds are left out. A counter that Ray shows as a gauge as well, without `_total`, is shown
    once.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        for line in text.splitlines():
            if line.startswith((f"# HELP {_OURS}", f"# TYPE {_OURS}")):
                header = line.replace(_RAYS, "", 1)
                family = header.split(" ", 3)[2]
                if header not in headers.setdefault(family, []):
                    headers[family].append(header)
            elif sample := _SAMPLE.match(line):
                application = _APPLICATION.search(sample["labels"])
                if application is not None and application[1] in applications:
                    name = line.split("{", 1)[0].removeprefix(_RAYS)
                    family = name if name in headers else _PARTS.sub("", name)
                    samples.setdefault(family, []).append(_RAYS_LABELS.sub("", line[len(_RAYS) :]))
    lines = []
    for family, found in sorted(samples.items()):
        if f"{family}_total" not in samples:
            lines += [*headers.get(family, ()), *found]
    return "\n".join(lines) + "\n"
