"""Rounds of an answer, for those who want to see how it was made."""

from typing import Any

from deployments.round import Round
from deployments.tokenizer import PromptTokenizer


def shown_round(tokenizer: PromptTokenizer, shown: Round) -> dict[str, Any]:
    """One round of a choice's `rounds`: what was committed, and the tree that was verified.

    Of `tokens` the first `accepted` were drafted, the one behind them is the target's own.
    """
    committed = shown.committed
    return {
        "base_len": committed.base_len,
        "tokens": [
            {**_token(tokenizer, token), "bytes": list(tokenizer.bytes_of(token))}
            for token in committed.tokens
        ],
        "accepted": committed.accepted,
        "tested": committed.tested,
        "nodes": _nodes(tokenizer, shown),
        "proposals": shown.proposals,
        "hits": shown.hits,
        "price": committed.price,
        "wait_ms": committed.timings.wait_ns / 1e6,
        "step_ms": committed.timings.step_ns / 1e6,
        "step_rows": committed.timings.step_rows,
    }


def _nodes(tokenizer: PromptTokenizer, shown: Round) -> list[dict[str, Any]]:
    draft = shown.committed.draft
    if draft is None:
        return []
    tree = draft.tree
    return [
        {
            **_token(tokenizer, token),
            "parent": parent,
            "score": score,
            "drafters": sorted(name for name, nodes in draft.sources.items() if node in nodes),
            "accepted": node in draft.accepted,
        }
        for node, (token, parent, score) in enumerate(
            zip(tree.tokens, tree.parents, tree.scores, strict=True)
        )
    ]


def _token(tokenizer: PromptTokenizer, token: int) -> dict[str, Any]:
    return {"id": token, "token": tokenizer.text_of(token)}
