"""Users for Locust that stream answers over HTTP and gRPC, in a closed loop or as Poisson arrivals.

    locust -f loadtest/locustfile.py HttpStreamUser --headless --host http://127.0.0.1:8000 \
        --rate 2 --run-time 60s --slo-ttft-ms 500 --slo-tpot-ms 40 --html out/load.html

Without --rate each user asks as soon as it has its answer. With --rate requests come whether or not earlier
ones are answered; those under way at the end are waited for. Prints a table, and writes it with its numbers
beside the HTML report. Exits with 1 if a request failed (or what --exit-code-on-error says), if nothing was
asked, or if fewer than --slo-share were answered within the limits. docs/loadtest.md explains the numbers.
"""

import contextlib
import itertools
import logging
import random
import sys
import time
from abc import abstractmethod
from argparse import Namespace
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import gevent
import grpc
import grpc.experimental.gevent
import httpx
from gevent.pool import Group
from locust import LoadTestShape, User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest import goodput, report, traffic
from loadtest.client import CHAT, blocking_events
from loadtest.prompts_file import Prompt, read
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc

ANSWER_S: Final = 600
DRAIN_S: Final = 60
"""So long requests that are under way when the test ends are waited for; then they have failed."""

_SEVERAL: Final = ("--master", "--worker", "--processes")

# Before the first channel: its threads would otherwise block every user.
grpc.experimental.gevent.init_gevent()
# Locust shows what libraries log: httpx a line a request.
logging.getLogger("httpx").setLevel(logging.WARNING)


class StreamUser(User):
    """Asks for streamed answers. What they all share is set before a test starts."""

    abstract = True
    kind: ClassVar[str]
    path: ClassVar[str]
    options: ClassVar[Namespace]
    limits: ClassVar[goodput.Limits]
    groups: ClassVar[list[tuple[float, list[Prompt]]]]
    tallies: ClassVar[dict[str, goodput.Tally]]
    numbers: ClassVar[Iterator[int]]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        options, number = self.options, next(self.numbers)
        self._asks = traffic.asks(
            self.groups, options.cancel_share, random.Random(f"{options.seed}/{number}/asks")
        )
        self._in_flight = Group()
        self._arrivals: Iterator[float] | None = None
        if options.rate:
            self._arrivals = traffic.arrivals(
                options.rate / options.num_users,
                partial(traffic.level, options.shape, options.run_time or 1.0),
                random.Random(f"{options.seed}/{number}/arrivals"),
            )
        self._started = self._due = 0.0

    @abstractmethod
    def chunks(self, ask: traffic.Ask) -> Generator[int]:
        """How many tokens each chunk of an answer has, as it comes; closing it ends the request.

        Raises an error that says why if the request fails.
        """

    def on_start(self) -> None:
        self._started = time.perf_counter()
        gevent.sleep(self.wait_time())

    def on_stop(self) -> None:
        # Those under way count: they are the slowest, and without them the others would look well.
        ended = time.time()
        self._in_flight.join(timeout=DRAIN_S)
        for _ in range(len(self._in_flight)):
            self._fail(RuntimeError(f"unanswered {DRAIN_S} s after the test's end"), ended)
        self._in_flight.kill()

    def wait_time(self) -> float:
        """Seconds until the next request."""
        if self._arrivals is None:
            return 0.0
        self._due = self._started + next(self._arrivals)
        return max(0.0, self._due - time.perf_counter())

    @task
    def ask(self) -> None:
        """One request: waited for in a closed loop, left to itself in an open one."""
        ask = next(self._asks)
        if self._arrivals is None:
            self._answer(ask, None)
        else:
            self._in_flight.spawn(self._answer, ask, self._due)

    def _answer(self, ask: traffic.Ask, due: float | None) -> None:
        sent, start_time = time.perf_counter(), time.time()
        lag_ms = None if due is None else 1000 * (sent - due)
        timeline = goodput.Timeline(sent if due is None else due)
        for tally in self._tallies():
            tally.start(sent, lag_ms)
        try:
            with contextlib.closing(self.chunks(ask)) as chunks:
                for tokens in chunks:
                    timeline.chunk(time.perf_counter(), tokens)
                    if timeline.chunks == ask.give_up_after:
                        self._give_up(timeline, start_time)
                        return
            if not timeline.tokens:
                raise RuntimeError(
                    "an answer without token ids: does the server know return_token_ids?"
                )
            self._succeed(timeline, start_time, lag_ms)
        except Exception as error:
            # Whatever went wrong: a request that is not counted would make the rest look well.
            self._fail(error, start_time)
        finally:
            for tally in self._tallies():
                tally.end(time.perf_counter())

    def _tallies(self) -> list[goodput.Tally]:
        return [
            self.tallies.setdefault(name, goodput.Tally())
            for name in (goodput.ALL, f"{self.kind} {self.path}")
        ]

    def _succeed(self, timeline: goodput.Timeline, start_time: float, lag_ms: float | None) -> None:
        for tally in self._tallies():
            tally.answer(timeline, self.limits)
        self._fire(self.kind, self.path, timeline.total_ms, start_time, timeline.tokens)
        measured: dict[str, list[float]] = {
            "ttft": [timeline.ttft_ms],
            "tpot": [] if timeline.tpot_ms is None else [timeline.tpot_ms],
            "itl per chunk": timeline.chunk_gaps_ms,
            "itl per token": timeline.token_gaps_ms,
            "sent late": [] if lag_ms is None else [lag_ms],
        }
        for name, times in measured.items():
            for ms in times:
                self._fire("llm", name, ms, start_time)

    def _give_up(self, timeline: goodput.Timeline, start_time: float) -> None:
        for tally in self._tallies():
            tally.given_up += 1
        name = f"{self.path}, given up"
        self._fire(self.kind, name, timeline.total_ms, start_time, timeline.tokens)

    def _fail(self, error: Exception, start_time: float) -> None:
        for tally in self._tallies():
            tally.failed += 1
        ms = 1000 * (time.time() - start_time)
        self._fire(self.kind, self.path, ms, start_time, exception=error)

    def _fire(
        self,
        kind: str,
        name: str,
        ms: float,
        start_time: float,
        tokens: int = 0,
        exception: Exception | None = None,
    ) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=ms,
            response_length=tokens,
            start_time=start_time,
            context={},
            exception=exception,
        )


class HttpStreamUser(StreamUser):
    """OpenAI's chat completions as server-sent events."""

    kind = "http-stream"
    path = CHAT
    http: ClassVar[httpx.Client]

    def chunks(self, ask: traffic.Ask) -> Generator[int]:
        options, drafting = self.options, traffic.drafting(self.options.speculation)
        speculation: dict[str, Any] = {"enabled": drafting.enabled}
        if drafting.drafters:
            speculation["drafter"] = drafting.drafters
        body = {
            "model": options.model or None,
            "messages": [{"role": "user", "content": ask.prompt.text}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": ask.seed,
            "return_token_ids": True,
            "speculation": speculation,
        }
        ended = False
        with contextlib.closing(blocking_events(self.http, CHAT, body)) as chunks:
            for chunk in chunks:
                if chunk is None:
                    ended = True
                elif "error" in chunk:
                    raise RuntimeError(chunk["error"])
                else:
                    yield sum(len(c.get("token_ids") or ()) for c in chunk["choices"])
        if not ended:
            raise RuntimeError("the stream was cut: it ended without [DONE]")


class GrpcStreamUser(StreamUser):
    """`slipstream.v1.Inference/Generate`."""

    kind = "grpc-stream"
    path = "Generate"
    # One for all users: each channel that waits takes one of gevent's few threads.
    stub: ClassVar[pb_grpc.InferenceStub]

    def chunks(self, ask: traffic.Ask) -> Generator[int]:
        options, drafting = self.options, traffic.drafting(self.options.speculation)
        request = pb.GenerateRequest(
            model=options.model,
            conversation=pb.Conversation(
                messages=[pb.Message(role="user", content=ask.prompt.text)]
            ),
            sampling=pb.Sampling(temperature=options.temperature, seed=ask.seed),
            stopping=pb.Stopping(max_tokens=options.max_tokens),
            speculation=pb.Speculation(enabled=drafting.enabled, drafters=drafting.drafters),
        )
        metadata = [("authorization", f"Bearer {options.api_key}")] if options.api_key else []
        call = self.stub.Generate(request, timeout=ANSWER_S, metadata=metadata)
        try:
            for response in call:
                yield len(response.token_ids)
        except grpc.RpcError as error:
            # Its own text has the time in it, and would make every failure one of its own.
            raise RuntimeError(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()


class Shaped(LoadTestShape):
    """The load over time: of users in a closed loop, of arrivals in an open one."""

    # Or Locust would take it, and ignore --users, even where no shape is asked for.
    abstract = True

    def tick(self) -> tuple[int, float] | None:
        options, passed = StreamUser.options, time.perf_counter() - self.start_time
        if passed >= options.run_time:
            return None
        share = 1.0 if options.rate else traffic.level(options.shape, options.run_time, passed)
        return max(1, round(options.num_users * share)), options.spawn_rate


def _add_options(parser: LocustArgumentParser) -> None:
    # Before Locust forks: its children would wait minutes for a parent that has ended.
    if any(argument.partition("=")[0] in _SEVERAL for argument in sys.argv):
        parser.error(f"{', '.join(_SEVERAL)} are not supported: limits are checked in one process")
    parser.add_argument(
        "--api-key",
        default="",
        env_var="SLIPSTREAM_API_KEY",
        is_secret=True,
        help="better given as SLIPSTREAM_API_KEY: results keep the command line",
    )
    group = parser.add_argument_group("Answers")
    group.add_argument(
        "--prompts",
        default="loadtest/prompts/six_kinds.jsonl",
        help="file of prompts, or Spec-Bench's question file",
    )
    group.add_argument(
        "--mix", default="", help="weights by category, writing:3,math:1; all evenly if left out"
    )
    group.add_argument("--max-tokens", type=int, default=128)
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--speculation", default="on", help='on, off, or drafters joined by "+"')
    group.add_argument("--model", default="", help="the server's only one if left out")
    group.add_argument("--grpc-host", default="127.0.0.1:9000", help="for GrpcStreamUser")
    group.add_argument(
        "--rate", type=float, default=0.0, help="arrivals a second, at random; 0: each user waits"
    )
    group.add_argument("--shape", choices=list(traffic.SHAPES), default=traffic.FLAT)
    group.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and answers")
    group.add_argument(
        "--cancel-share", type=float, default=0.0, help="of the requests that are given up early"
    )
    group.add_argument("--slo-ttft-ms", type=float, help="limit of the time to first token")
    group.add_argument("--slo-tpot-ms", type=float, help="limit of the time per output token")
    group.add_argument(
        "--slo-share", type=float, default=0.99, help="of the requests must be within the limits"
    )


def _prepare(environment: Environment, **_: Any) -> None:
    """Checks the options, and sets what users share. Ends the process with the reason if one is wrong."""
    options = environment.parsed_options
    assert options is not None
    try:
        _check(environment, options)
        mix = traffic.parse_mix(options.mix) if options.mix else {}
        StreamUser.groups = traffic.grouped(read(Path(options.prompts)), mix)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    StreamUser.options = options
    StreamUser.limits = goodput.Limits(options.slo_ttft_ms, options.slo_tpot_ms)
    StreamUser.tallies = {}
    StreamUser.numbers = itertools.count()
    # A connection for each request, as if each were another client's.
    connections = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    HttpStreamUser.http = httpx.Client(
        base_url=environment.host or "", headers=headers, timeout=ANSWER_S, limits=connections
    )
    GrpcStreamUser.stub = pb_grpc.InferenceStub(grpc.insecure_channel(options.grpc_host))
    if options.rate:
        # Each is a Poisson process of its share of the rate: together they are one of the whole rate.
        options.num_users = options.spawn_rate = len(environment.user_classes)
    else:
        options.num_users, options.spawn_rate = options.num_users or 1, options.spawn_rate or 1
    if options.shape != traffic.FLAT:
        environment.shape_class = Shaped()  # type: ignore[no-untyped-call]
        environment.shape_class.runner = environment.runner


def _check(environment: Environment, options: Namespace) -> None:
    if HttpStreamUser in environment.user_classes and not environment.host:
        raise ValueError("HttpStreamUser needs --host, for example --host http://127.0.0.1:8000")
    if options.rate < 0:
        raise ValueError(f"--rate must be above 0, or 0 for a closed loop, not {options.rate}")
    if options.rate and options.num_users:
        raise ValueError(
            f"--users {options.num_users} with --rate {options.rate}: with a rate, requests come "
            "however many wait; leave --users out"
        )
    if options.shape != traffic.FLAT and not options.run_time:
        raise ValueError(f"--shape {options.shape} needs --run-time, over which it goes")
    for name in ("cancel_share", "slo_share"):
        if not 0 <= (value := getattr(options, name)) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to 1, not {value}")


def _finish(environment: Environment, **_: Any) -> None:
    """The table, its files and the exit code."""
    options, tallies = StreamUser.options, StreamUser.tallies
    # Of one stream there is nothing to add up.
    names = list(tallies)[1:] if len(tallies) == 2 else list(tallies) or [goodput.ALL]
    rows = [
        goodput.row(name, tallies.get(name, goodput.Tally()), StreamUser.limits) for name in names
    ]
    table = goodput.markdown(rows)
    if options.html_file:
        file = Path(options.html_file)
        report.write(file.parent, file.stem, table, rows)
    else:
        print(table)
    reason = goodput.shortfall(rows[0], options.slo_share)
    if reason:
        print(f"error: {reason}", file=sys.stderr)
        environment.process_exit_code = 1


events.init_command_line_parser.add_listener(_add_options)
events.init.add_listener(_prepare)
events.quitting.add_listener(_finish)
