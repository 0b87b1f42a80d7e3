"""What a load test counts: times to the first token and between tokens, answers within limits."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from loadtest.client import quantile

ALL: Final = "all"


@dataclass(slots=True)
class Timeline:
    """When the tokens of one answer came; times are seconds of one clock.

    `began` is when the request was due, so that a client that sends late does not hide it.
    """

    began: float
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)

    def chunk(self, at: float, tokens: int) -> None:
        """A chunk came. One without tokens (the opening, the usage) is no step of the answer."""
        if not tokens:
            return
        if self.tokens:
            self.gaps.append((at - self.last, tokens))
        else:
            self.first = at
        self.tokens += tokens
        self.last = at

    @property
    def chunks(self) -> int:
        """Chunks with tokens so far."""
        return len(self.gaps) + (self.tokens > 0)

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return 1000 * (self.first - self.began)

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token behind the first; None for an answer of one token."""
        return 1000 * (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def total_ms(self) -> float:
        """Until the last token."""
        return 1000 * (self.last - self.began)

    @property
    def chunk_gaps_ms(self) -> list[float]:
        """Pauses between chunks, one a round of the server: what a reader sees."""
        return [1000 * gap for gap, _ in self.gaps]

    @property
    def token_gaps_ms(self) -> list[float]:
        """The same pauses spread over the tokens that ended them, one a token behind the first chunk."""
        return [1000 * gap / tokens for gap, tokens in self.gaps for _ in range(tokens)]


@dataclass(frozen=True, slots=True)
class Limits:
    """Service level objectives in milliseconds; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __bool__(self) -> bool:
        """Whether there is any."""
        return self.ttft_ms is not None or self.tpot_ms is not None

    def hold(self, ttft_ms: float | None, tpot_ms: float | None) -> bool:
        """Whether both times, where there are any, are within their limits."""
        pairs = ((ttft_ms, self.ttft_ms), (tpot_ms, self.tpot_ms))
        return all(time is None or limit is None or time <= limit for time, limit in pairs)


@dataclass(slots=True)
class Tally:
    """What was counted of one stream. Numbers rather than answers: a soak has millions of tokens."""

    failed: int = 0
    given_up: int = 0
    in_flight: int = 0
    most_in_flight: int = 0
    good: int = 0
    tokens: int = 0
    began: float | None = None
    ended: float = 0.0
    ttft_ms: "array[float]" = field(default_factory=lambda: array("d"))
    tpot_ms: "array[float]" = field(default_factory=lambda: array("d"))
    chunk_gaps_ms: "array[float]" = field(default_factory=lambda: array("d"))
    token_gaps_ms: "array[float]" = field(default_factory=lambda: array("d"))
    lags_ms: "array[float]" = field(default_factory=lambda: array("d"))

    def start(self, at: float, lag_ms: float | None) -> None:
        """A request is sent; `lag_ms` after it was due, None in a closed loop, where none is ever due."""
        self.began = at if self.began is None else self.began
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if lag_ms is not None:
            self.lags_ms.append(lag_ms)

    def end(self, at: float) -> None:
        """It is over, however it went."""
        self.in_flight -= 1
        self.ended = at

    def answer(self, timeline: Timeline, limits: Limits) -> None:
        """It was answered."""
        self.good += limits.hold(timeline.ttft_ms, timeline.tpot_ms)
        self.tokens += timeline.tokens
        self.ttft_ms.append(timeline.ttft_ms)
        if timeline.tpot_ms is not None:
            self.tpot_ms.append(timeline.tpot_ms)
        self.chunk_gaps_ms.extend(timeline.chunk_gaps_ms)
        self.token_gaps_ms.extend(timeline.token_gaps_ms)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. Times are milliseconds, None where there was nothing to time.

    `goodput_share` is of the requests that were not given up, None without limits.
    """

    stream: str
    seconds: float
    answered: int
    failed: int
    given_up: int
    most_in_flight: int
    answered_per_s: float
    tokens_per_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    itl_chunk_p50: float | None
    itl_chunk_p99: float | None
    itl_token_p50: float | None
    itl_token_p99: float | None
    lag_p99: float | None
    goodput_share: float | None
    goodput_per_s: float | None


def row(stream: str, tally: Tally, limits: Limits) -> Row:
    """The line of one stream."""
    seconds = 0.0 if tally.began is None else tally.ended - tally.began
    answered = len(tally.ttft_ms)

    def per_s(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return Row(
        stream=stream,
        seconds=seconds,
        answered=answered,
        failed=tally.failed,
        given_up=tally.given_up,
        most_in_flight=tally.most_in_flight,
        answered_per_s=per_s(answered),
        tokens_per_s=per_s(tally.tokens),
        ttft_p50=_quantile(tally.ttft_ms, 0.5),
        ttft_p99=_quantile(tally.ttft_ms, 0.99),
        tpot_p50=_quantile(tally.tpot_ms, 0.5),
        tpot_p99=_quantile(tally.tpot_ms, 0.99),
        itl_chunk_p50=_quantile(tally.chunk_gaps_ms, 0.5),
        itl_chunk_p99=_quantile(tally.chunk_gaps_ms, 0.99),
        itl_token_p50=_quantile(tally.token_gaps_ms, 0.5),
        itl_token_p99=_quantile(tally.token_gaps_ms, 0.99),
        lag_p99=_quantile(tally.lags_ms, 0.99),
        goodput_share=tally.good / max(1, answered + tally.failed) if limits else None,
        goodput_per_s=per_s(tally.good) if limits else None,
    )


def shortfall(overall: Row, share: float) -> str | None:
    """Why a load test has failed although its requests did not, if it has."""
    if not overall.answered and not overall.failed:
        return "no request was answered: is --run-time shorter than an answer, or --rate too low?"
    if overall.goodput_share is not None and overall.goodput_share < share:
        return (
            f"{overall.goodput_share:.4f} of the requests were answered within the limits, "
            f"less than --slo-share {share}"
        )
    return None


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = [
        "| stream | answered | failed | given up | in flight at most | requests/s | tokens/s "
        "| TTFT p50 / p99, ms | TPOT p50 / p99, ms | ITL per chunk p50 / p99, ms "
        "| ITL per token p50 / p99, ms | sent late p99, ms | goodput, share | goodput, requests/s |",
        "|---" * 14 + "|",
    ]
    for line in rows:
        cells = [
            line.stream,
            *map(str, (line.answered, line.failed, line.given_up, line.most_in_flight)),
            _number(line.answered_per_s, 2),
            _number(line.tokens_per_s, 0),
            f"{_number(line.ttft_p50, 0)} / {_number(line.ttft_p99, 0)}",
            f"{_number(line.tpot_p50, 1)} / {_number(line.tpot_p99, 1)}",
            f"{_number(line.itl_chunk_p50, 1)} / {_number(line.itl_chunk_p99, 1)}",
            f"{_number(line.itl_token_p50, 1)} / {_number(line.itl_token_p99, 1)}",
            _number(line.lag_p99, 1),
            _number(line.goodput_share, 3),
            _number(line.goodput_per_s, 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _quantile(values: Sequence[float], share: float) -> float | None:
    return quantile(values, share) if values else None


def _number(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"
