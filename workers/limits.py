"""Every size limit between processes, in one place.

A peer that exceeds one is refused before anything is allocated for it.
"""

from typing import Final

PROTOCOL_VERSION: Final = 7

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""One gRPC message; a tokenizer file is the largest that is expected."""

MAX_TREE_NODES: Final = 256
"""Drafted nodes of one tree, whatever a worker's own limit says."""

MAX_PREDICTED_NODES: Final = 64
"""Drafted nodes of one answer that one step verifies at most, where it follows the request's prediction: the
price decides how many of them, not the target's `max_draft_tokens`."""

LOOKAHEAD: Final = 4
"""A proposal holds at most this many times the nodes that one step verifies: the rest is for later steps."""

MAX_SEQUENCE_TOKENS: Final = 4 * 1024 * 1024
"""Tokens in one message."""

FEATURE_CHUNK_BYTES: Final = 1024 * 1024
"""Features of a prompt are sent in pieces of this size, so that they do not hold up commits."""

MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_TOP_LOGPROBS: Final = 20
MAX_TOP_K: Final = 2**31 - 1
MAX_REPETITION_PENALTY: Final = 100.0
MAX_LOGIT_BIAS: Final = 1024
MAX_TOOLS: Final = 128
MAX_GRAMMAR_CHARS: Final = 128 * 1024
MAX_CHOICES: Final = 128
"""Answers of one request: prompts times n."""

MAX_TRACEPARENT_CHARS: Final = 64
MAX_KEY_ID_CHARS: Final = 64
MAX_SEED: Final = 2**63 - 1
MIN_SEED: Final = -(2**63)

LEASE_CLAIM_SECONDS: Final = 5.0
"""A lease that no session claims within this time ends."""
