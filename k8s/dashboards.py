"""Writes what is shown of the metrics of deployments/metrics.py: Grafana's dashboards, and the table of
docs/observability.md.

    python k8s/dashboards.py

A dashboard here is a list of panels: a title, what a good value looks like and what to do otherwise, a unit,
and a query for each legend.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ray.serve.metrics import Counter, Gauge, Histogram

from deployments.metrics import CoordinatorMetrics, WorkerMetrics
from protos import speculation_pb2 as pb

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "k8s" / "chart" / "files" / "dashboards"
DOCS: Final = ROOT / "docs" / "observability.md"
PROTO: Final = ROOT / "protos" / "speculation.proto"

FAILED: Final = 'finish_reason!~"stop|length|abort"'
WINDOW: Final = "15m"
"""Over which rare events are counted."""

SUFFIXES: Final = {
    Counter: ("_total",),
    Gauge: ("",),
    Histogram: ("_bucket", "_sum", "_count"),
}
"""Of the names under which Ray exports a metric."""


def families() -> Iterator[Counter | Gauge | Histogram]:
    """Every metric that deployments/metrics.py defines."""
    for owner in (CoordinatorMetrics(), WorkerMetrics()):
        for held in vars(owner).values():
            for metric in held.values() if isinstance(held, dict) else (held,):
                if isinstance(metric, tuple(SUFFIXES)):
                    yield metric


def exported(metric: Counter | Gauge | Histogram) -> list[str]:
    """Its names at Ray's exporters."""
    return [f"ray_{metric.info['name']}{suffix}" for suffix in SUFFIXES[type(metric)]]


# ---- queries ----


@dataclass(frozen=True)
class Series:
    """Series of one metric that a dashboard's variables choose, summed by labels."""

    name: str
    by: str
    where: str

    @property
    def chosen(self) -> str:
        return f"ray_slipstream_{self.name}{{{self.where}}}"

    @property
    def now(self) -> str:
        """A gauge's value."""
        return f"sum by ({self.by}) ({self.chosen})"

    @property
    def count(self) -> str:
        """How many processes have it."""
        return f"count by ({self.by}) ({self.chosen})"

    @property
    def mean(self) -> str:
        """A gauge's mean over processes."""
        return f"avg by ({self.by}) ({self.chosen})"

    @property
    def rate(self) -> str:
        """How much a counter has grown a second."""
        return f"sum by ({self.by}) (rate({self.chosen}[$__rate_interval]))"

    @property
    def recent(self) -> str:
        """How much a counter has grown lately, its first values included, which rate() does not see.

        A series belongs to one process, so it never begins anew.
        """
        last = f"last_over_time({self.chosen}[{WINDOW}])"
        return f"sum by ({self.by}) ({last} - ({self.chosen} offset {WINDOW} or 0 * {last}))"

    def quantile(self, share: float) -> str:
        """Of a histogram."""
        buckets = Series(
            f"{self.name}_bucket", ", ".join(filter(None, ("le", self.by))), self.where
        )
        return f"histogram_quantile({share}, {buckets.rate})"


def answers(name: str, by: str = "", where: str = "") -> Series:
    """Of coordinators."""
    chosen = 'application=~"$application", model=~"$model"'
    return Series(name, by, f"{chosen}, {where}" if where else chosen)


def workers(name: str, by: str = "application", deployment: str = "Target") -> Series:
    """Of the workers of a deployment, targets if nothing else is said; `application` tells pools apart."""
    return Series(f"worker_{name}", by, f'application=~"$application", deployment=~"{deployment}"')


def pools(name: str) -> Series:
    """Of all workers."""
    return workers(name, "application, deployment", "Target|Draft")


def fronts(name: str, by: str) -> Series:
    """Of coordinators, where no model is to blame."""
    return Series(name, by, 'application=~"$application"')


def zero(query: str, beside: Series) -> str:
    """A query that shows 0 where nothing has been counted yet, and `beside` is there."""
    return f"{query} or 0 * {beside.now}"


def ratio(part: str, whole: str) -> str:
    """What part of the whole; 0 where no part was ever counted, nothing where there is no whole."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def quantiles(series: Series, *shares: float) -> dict[str, str]:
    """By legend."""
    label = f" {{{{{series.by}}}}}" if series.by else ""
    return {f"p{100 * share:g}{label}": series.quantile(share) for share in shares}


# ---- dashboards ----


@dataclass(frozen=True)
class Panel:
    """A graph; `queries` are by legend."""

    title: str
    says: str
    unit: str
    queries: dict[str, str]


DRAFTS: Final = answers("spec_decode_num_drafts_total", "drafter").rate
ALL_DRAFTS: Final = answers("spec_decode_num_drafts_total").rate
DRAFTED: Final = answers("spec_decode_num_draft_tokens_total", "drafter").rate
ACCEPTED: Final = answers("spec_decode_num_accepted_tokens_total", "drafter").rate
LEASES: Final = workers("leases")
PROPOSED: Final = pools("proposals_total").rate
POOL: Final = "{{deployment}} {{application}}"

OVERVIEW: Final = [
    Panel(
        "Answers by how they ended",
        "Answers that ended, a second. stop and length are good; abort is a client that left; "
        "everything else is an error, by its gRPC code. Requests that are refused at the door "
        "(4xx) are not among them.",
        "reqps",
        {"{{finish_reason}}": answers("answers_total", "finish_reason").rate},
    ),
    Panel(
        "Answers that failed",
        f"Over {WINDOW}, the share of answers that ended with an error. 0 is good. unavailable: look at "
        "Faults and Replicas; resource_exhausted: more targets; deadline_exceeded: Queue and Time per "
        "output token.",
        "percentunit",
        {
            "failed": ratio(
                answers("answers_total", "", FAILED).recent, answers("answers_total").recent
            )
        },
    ),
    Panel(
        "Time to first token",
        "From a request's arrival to its first token: queue and prefill. Good: p99 below what "
        "users wait for. If Queue is as high, targets are short; if not, prompts are long: see "
        "Prefix cache.",
        "s",
        quantiles(answers("time_to_first_token_seconds"), 0.5, 0.99),
    ),
    Panel(
        "Time per output token",
        "Between the first token of an answer and its last. Good: flat. If it rises with Running "
        "sessions, the targets are full; if it rises without, see Step time and drift.",
        "s",
        quantiles(answers("time_per_output_token_seconds"), 0.5, 0.99),
    ),
    Panel(
        "Queue",
        "From a request's arrival to its place on a target. Good: milliseconds. Higher: every "
        "target holds as many answers as it may; add targets, or raise max_num_seqs where the KV "
        "cache has room.",
        "s",
        quantiles(answers("queue_seconds"), 0.5, 0.99),
    ),
    Panel(
        "Whole answers",
        "From a request's arrival to the end of its answer. It depends on how long answers are: "
        "compare with itself, last week.",
        "s",
        quantiles(answers("request_seconds"), 0.5, 0.99),
    ),
    Panel(
        "Tokens",
        "Tokens that became part of answers, a second. Good: as many as were measured before under "
        "this load (Running sessions).",
        "short",
        {"tokens/s {{application}}": workers("tokens_committed_total").rate},
    ),
    Panel(
        "Sessions of targets",
        "Answers that take part in steps, and answers that have a place but wait for room in a "
        "step or in the KV cache. Good: waiting near 0. Else see KV cache, and add targets.",
        "short",
        {
            "running {{application}}": workers("running_sessions").now,
            "waiting {{application}}": workers("waiting_sessions").now,
        },
    ),
    Panel(
        "Faults",
        f"Over {WINDOW}. target_lost: an answer went on elsewhere after a pause; draft_lost and "
        "drafter_failed: it went on without that drafter; gap and duplicate: a message came "
        "wrongly. 0 is good; a few around an upgrade are normal. Else read the log of the workers "
        "that are lost.",
        "short",
        {"{{kind}}": f"{answers('faults_total', 'kind').recent} or on () vector(0)"},
    ),
    Panel(
        "Replicas",
        "Workers that report, by pool. Good: what was asked for. Fewer: `serve status` says why, "
        "or the node is not scraped.",
        "short",
        {POOL: pools("leases").count},
    ),
    Panel(
        "Leases",
        "Answers that hold a place on a worker, by pool: what Serve scales by "
        "(target_ongoing_requests).",
        "short",
        {POOL: pools("leases").now},
    ),
    Panel(
        "Processors of coordinators",
        "Processors that each coordinator is busy with. It runs Python in one process: above 0.8 "
        "tokens begin to wait in it. Then add coordinators.",
        "short",
        {"{{replica}}": fronts("coordinator_cpu_seconds_total", "replica").rate},
    ),
]

SPECULATION: Final = [
    Panel(
        "Accepted length τ",
        "Tokens that a round with a draft commits: 1 + accepted / drafts. 2 to 4 is good; near 1 "
        "the drafter is of no use for this traffic: name another, train one, or let auto choose.",
        "short",
        {"{{drafter}}": f"1 + {ratio(ACCEPTED, DRAFTS)}"},
    ),
    Panel(
        "Accepted length of answers",
        "Tokens a round in the mean of an answer, rounds without a draft included, over answers: "
        "half are above p50. A p10 near 1 beside a good p90 means that traffic is mixed: auto "
        "serves it best.",
        "short",
        quantiles(answers("accepted_length"), 0.1, 0.5, 0.9),
    ),
    Panel(
        "Tokens a round",
        "Tokens committed by rounds, with a draft or without: what speculation makes of a pass. 1 "
        "is plain decoding.",
        "short",
        {
            "{{drafter}}": ratio(
                answers("committed_tokens_total", "drafter").rate,
                answers("rounds_total", "drafter").rate,
            )
        },
    ),
    Panel(
        "Acceptance by position",
        "Of all drafts, how many had their token at this position accepted (0 is the first). It "
        "falls with the position; a first one below 0.3 is a drafter that does not know the "
        "target.",
        "percentunit",
        {
            "{{position}}": answers(
                "spec_decode_num_accepted_tokens_per_pos_total", "position"
            ).rate
            + f" / on () group_left () ({ALL_DRAFTS} > 0)"
        },
    ),
    Panel(
        "Drafted tokens a draft",
        "How many tokens are verified at once. The price decides: many while targets are idle, "
        "few under load.",
        "short",
        {"{{drafter}}": ratio(DRAFTED, DRAFTS)},
    ),
    Panel(
        "Wasted rows",
        "Drafted tokens that were verified and not accepted, a second: work of targets for "
        "nothing. It is the price of latency while targets are idle; when they are busy it should "
        "fall by itself.",
        "short",
        {"{{drafter}}": f"{DRAFTED} - ({ACCEPTED} or 0 * {DRAFTED})"},
    ),
    Panel(
        "Wasted part of rows",
        "Of all rows that targets computed, how many were drafted and not accepted. Under load "
        "below 0.2; higher while sessions wait: lower max_draft_tokens.",
        "percentunit",
        {
            "{{application}}": ratio(
                f"({workers('tokens_drafted_total').rate} - "
                f"({workers('tokens_accepted_total').rate} or 0 * {workers('tokens_drafted_total').rate}))",
                workers("rows_total").rate,
            )
        },
    ),
    Panel(
        "Proposals that were ready",
        "Of the proposals of drafters, how many were known before the commit that they answer: no "
        "wait at all. With mode sequential 0; with multibranch the higher the better.",
        "percentunit",
        {
            "{{drafter}}": ratio(
                answers("hits_total", "drafter").rate, answers("proposals_total", "drafter").rate
            )
        },
    ),
    Panel(
        "Proposals that were ready, by pool",
        "As before, as the workers count it: those of draft pools, and those of drafters beside targets.",
        "percentunit",
        {POOL: ratio(pools("hits_total").rate, PROPOSED)},
    ),
    Panel(
        "What becomes of proposals",
        "A second: verified; rebased, which are those of them that were made for an earlier end "
        "of the answer; dropped, because they fitted no more; sent again, because their tree had "
        "grown. Many dropped: drafts come too late; put them nearer.",
        "short",
        {
            f"{what} {{{{application}}}}": zero(
                workers(f"{name}_total", deployment=deployment).rate,
                workers("leases", deployment=deployment),
            )
            for what, name, deployment in (
                ("used", "proposals_used", "Target"),
                ("rebased", "proposals_rebased", "Target"),
                ("dropped", "proposals_dropped", "Target"),
                ("sent again", "proposals_again", "Draft"),
            )
        },
    ),
    Panel(
        "Price of a row",
        "What a drafted row must be worth, in tokens, to be verified: the mean over targets. Low "
        "while they are idle; it rises as steps fill. From 1 on nothing is worth it.",
        "short",
        {"{{application}}": workers("price").mean},
    ),
    Panel(
        "Rate λ",
        "Tokens a second that all answers of a pool get in the best cut of now, by the target's "
        "own reckoning. 0 while nobody asks.",
        "short",
        {"{{application}}": workers("rate").now},
    ),
    Panel(
        "Rows left out for their price",
        "Drafted tokens a second that cost more than they promised. High under load, and meant so.",
        "short",
        {"{{application}}": zero(workers("nodes_priced_out_total").rate, LEASES)},
    ),
    Panel(
        "Waits for proposals",
        "Steps a second that waited for a drafter, and waits that ended without a proposal. In "
        "vain should be few of them; else drafts are slow or far: near drafters, fewer sessions "
        "each, or a lower max_patience_ms.",
        "short",
        {
            "waits {{application}}": zero(workers("waits_total").rate, LEASES),
            "in vain {{application}}": zero(workers("waits_in_vain_total").rate, LEASES),
        },
    ),
    Panel(
        "Time of a wait",
        "Mean. A wait pays only while it is shorter than the step that it saves.",
        "s",
        {
            "{{application}}": ratio(
                f"{workers('wait_ns_total').rate} / 1e9", workers("waits_total").rate
            )
        },
    ),
    Panel(
        "Time of a proposal",
        "Mean that drafters take while a target may wait. Good: well below Step time.",
        "s",
        {POOL: ratio(f"{pools('draft_ns_total').rate} / 1e9", PROPOSED)},
    ),
    Panel(
        "Drafting while targets verify",
        "Processors or GPUs that are busy growing trees meanwhile (modes pipelined and "
        "multibranch), by pool.",
        "short",
        {
            "{{application}}": zero(
                f"{workers('growth_ns_total', deployment='Draft').rate} / 1e9",
                workers("leases", deployment="Draft"),
            )
        },
    ),
    Panel(
        "Online learning",
        f"Over {WINDOW}, of draft models with online: updates that they have learned, and how often updates "
        "were taken back because answers since then were guessed worse. Often: what is asked changes faster "
        "than it can be learned; leave out online.",
        "short",
        {
            f"{what} {{{{application}}}}": zero(
                workers(f"{name}_total", deployment="Draft").recent,
                workers("leases", deployment="Draft"),
            )
            for what, name in (("updates", "online_updates"), ("reverts", "online_reverts"))
        },
    ),
    Panel(
        "What updates bring",
        "Of the tokens that targets took after an update, how many the draft's first guess held: with it, "
        "and without what is not known to help. With should be above without, or it is taken back.",
        "percentunit",
        {
            f"{what} {{{{application}}}}": ratio(
                workers(f"{name}_total", deployment="Draft").rate,
                workers("online_compared_total", deployment="Draft").rate,
            )
            for what, name in (("with", "online_right"), ("without", "online_right_before"))
        },
    ),
]

ENGINE: Final = [
    Panel(
        "Step time",
        "How long a pass of the model takes. Good: p99 within three times p50. Long ones are "
        "prefills: lower max_num_batched_tokens if tokens of others must not wait for them.",
        "s",
        {
            **quantiles(workers("step_seconds"), 0.5, 0.99),
            "mean {{application}}": ratio(
                f"{workers('step_ns_total').rate} / 1e9", workers("steps_total").rate
            ),
        },
    ),
    Panel(
        "Drift",
        "How much slower passes are now than the table measured at the start, the mean over "
        "targets: 1 is good. Above 1.3 something else uses the machine; the prices of drafts "
        "follow it.",
        "short",
        {"{{application}}": workers("drift").mean},
    ),
    Panel(
        "Rows a step",
        "Tokens in a pass, of all answers. More rows in the same time is throughput; p99 are "
        "prefills.",
        "short",
        {
            **quantiles(workers("step_rows"), 0.5, 0.99),
            "mean {{application}}": ratio(workers("rows_total").rate, workers("steps_total").rate),
        },
    ),
    Panel(
        "Steps that answers share",
        "Of all passes, those with rows of more than one answer. Near 1 under load.",
        "percentunit",
        {"{{application}}": ratio(workers("shared_steps_total").rate, workers("steps_total").rate)},
    ),
    Panel(
        "Busy",
        "Part of the time that a target is in a pass, by replica. At 1 it is full. Low with "
        "Waiting sessions above 0: see KV cache. Far apart between replicas: routing is uneven.",
        "percentunit",
        {"{{replica}}": f"{workers('step_ns_total', 'replica').rate} / 1e9"},
    ),
    Panel(
        "KV cache",
        "Part of the slots that sessions hold. Good below 0.9. At 1 answers wait and are "
        "preempted: more memory (gpu_memory_utilization), fewer sessions (max_num_seqs), or more "
        "targets.",
        "percentunit",
        {
            "{{application}}": f"1 - {workers('kv_free_slots').now} / ({workers('kv_slots').now} > 0)"
        },
    ),
    Panel(
        "Preemptions",
        "Sessions a second that gave up their part of the cache and are computed anew. 0 is good; "
        "else as for KV cache.",
        "short",
        {"{{application}}": zero(workers("preemptions_total").rate, LEASES)},
    ),
    Panel(
        "Prefix cache",
        "Of the tokens of prompts, how many were found in the cache. High where prompts begin "
        "alike (system prompts, chats); if they do and it is low, the cache is too small or "
        "requests go to other targets.",
        "percentunit",
        {
            "{{application}}": ratio(
                workers("prefix_hits_total").rate, workers("prefix_queries_total").rate
            )
        },
    ),
    Panel(
        "Answers taken over",
        f"Answers that another target had begun, over {WINDOW}. As many as target_lost in Faults: "
        "fewer means that nobody with the same weights was left.",
        "short",
        {"{{application}}": zero(workers("resumed_total").recent, LEASES)},
    ),
    Panel(
        "Messages",
        "Between coordinators and workers, a second. They grow with tokens; a jump without is a "
        "drafter that talks too much.",
        "short",
        {"{{role}} {{direction}}": fronts("messages_total", "role, direction").rate},
    ),
]

DASHBOARDS: Final = {
    "overview": ("Slipstream: overview", OVERVIEW),
    "speculation": ("Slipstream: speculation", SPECULATION),
    "engine": ("Slipstream: engine", ENGINE),
}

SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


def dashboard(name: str) -> dict[str, Any]:
    """Grafana's model of it."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"slipstream-{name}",
        "title": title,
        "tags": ["slipstream"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable(
                    "application",
                    'label_values({__name__=~"ray_slipstream_(worker_leases|messages_total)"}, application)',
                ),
                _variable(
                    "model",
                    'label_values(ray_slipstream_answers_total{application=~"$application"}, model)',
                ),
            ]
        },
        "panels": [_graph(number, panel) for number, panel in enumerate(panels)],
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _graph(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.says,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


# ---- the table ----

BEGIN, END = "<!-- metrics: python k8s/dashboards.py -->", "<!-- end of metrics -->"


def table() -> str:
    """Every metric, as the docs have it; what workers say of themselves as the protocol describes it."""
    message = re.search(r"^message WorkerStatus {\n(.*?)^}", PROTO.read_text(), re.M | re.S)
    assert message is not None
    said = {name: text for text, name in re.findall(r"// (.*)\n  \w+ (\w+) = \d+;", message[1])}
    assert set(said) == {field.name for field in pb.WorkerStatus.DESCRIPTOR.fields}
    lines = ["| name | kind | labels | what it says |", "|---|---|---|---|"]
    for metric in families():
        info = metric.info
        field = info["name"].removeprefix("slipstream_worker_")
        labels = ", ".join(info["tag_keys"])
        kind = type(metric).__name__.lower()
        text = said.get(field, info["description"])
        lines.append(f"| `{info['name']}` | {kind} | {labels} | {text} |")
    return "\n".join(lines)


def made() -> dict[Path, str]:
    """The content of every file that is written here."""
    files = {
        FOLDER / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in DASHBOARDS
    }
    before, rest = DOCS.read_text().split(BEGIN)
    files[DOCS] = f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"
    return files


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text)
