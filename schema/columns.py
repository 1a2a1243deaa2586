"""The Arrow schema of a shard: the name, type, unit, nullability and meaning of every column.

There is one schema per format version, and it is byte-identical in every shard, empty ones
included. What differs between runs (the fingerprint) stands in the Parquet key-value metadata.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

FORMAT_VERSION: Final = 2

# keys of the Parquet key-value metadata, so that a lone shard explains itself
VERSION_KEY: Final = "rollout.format_version"
FINGERPRINT_KEY: Final = "rollout.fingerprint"

SUPPORT_KINDS: Final = ("kept", "top", "none")


def _list(element: pa.DataType) -> pa.DataType:
    # elements are never null: a missing support is a null list, never a list of nulls
    return pa.list_(pa.field("element", element, nullable=False))


def _field(
    name: str, type_: pa.DataType, unit: str, meaning: str, *, null: bool = False
) -> pa.Field:
    return pa.field(name, type_, nullable=null, metadata={"unit": unit, "meaning": meaning})


SCHEMA: Final[pa.Schema] = pa.schema(
    [
        _field(
            "rollout_id",
            pa.string(),
            "id",
            "stable over re-runs: from the run fingerprint, the prompt's key and sample_index",
        ),
        _field(
            "group_id",
            pa.string(),
            "id",
            "the samples of one prompt share it; stable over re-runs",
        ),
        _field("prompt_id", pa.string(), "id", "the user's own id, carried along"),
        _field("sample_index", pa.int32(), "index", "index in the group, from 0"),
        _field("group_size", pa.int32(), "samples", "samples asked for; a group may hold fewer"),
        _field("prompt_token_ids", _list(pa.int32()), "token id", "exactly what the engine saw"),
        _field(
            "token_ids",
            _list(pa.int32()),
            "token id",
            "exactly what was sampled, terminal token included",
        ),
        _field(
            "text",
            pa.string(),
            "text",
            "the completion decoded, for people; training never reads it",
            null=True,
        ),
        _field(
            "sampled_logprobs",
            _list(pa.float32()),
            "nats",
            "log q of each sampled token, after temperature and truncation, normalised over what "
            "the sampler could draw",
        ),
        _field("temperature", pa.float32(), "1", "the temperature in force"),
        _field(
            "policy_step",
            pa.int64(),
            "step",
            "which weights sampled this, where the job says so",
            null=True,
        ),
        _field(
            "support_kind",
            pa.string(),
            "kept | top | none",
            "kept: the exact truncated support; top: the most probable ids of an untruncated row; "
            "none: nothing beside the sampled logprob",
        ),
        _field(
            "support_offsets",
            _list(pa.int64()),
            "entry",
            "CSR row pointers into this rollout's support_entries, num_tokens + 1 values from 0; "
            "null for none",
            null=True,
        ),
        _field(
            "support_entries",
            _list(pa.uint64()),
            "float32 bits of log q << 32 | token id",
            "the support of every token, each in ascending unsigned order; null for none",
            null=True,
        ),
        _field(
            "tail_mass",
            _list(pa.float32()),
            "probability",
            "probability outside support_entries, from a log-sum-exp of the tail; 0 for kept, "
            "null for none",
            null=True,
        ),
        _field(
            "draw_entries",
            _list(pa.uint64()),
            "float32 bits of log q << 32 | token id",
            "K independent draws from q for every token in the order drawn, repeats kept",
            null=True,
        ),
        _field("finish_reason", pa.string(), "text", "why the engine ended it", null=True),
        _field(
            "stop_reason", pa.string(), "text", "the stop string or id that ended it", null=True
        ),
        _field("num_prompt_tokens", pa.int32(), "tokens", "length of prompt_token_ids"),
        _field("num_tokens", pa.int32(), "tokens", "length of token_ids"),
        _field("num_support_entries", pa.int64(), "entries", "length of support_entries, or 0"),
        _field("reward", pa.float32(), "reward", "from the job's reward function", null=True),
        _field("advantage", pa.float32(), "reward", "from the job or the user", null=True),
        _field(
            "metadata",
            pa.string(),
            "JSON",
            "the user's own columns, values recoverable exactly",
            null=True,
        ),
    ]
)

# columns whose minimum and maximum are kept per row group, so that a loader plans from a few kB;
# text and metadata are left out, since their extremes can be as long as the values
SCALAR_COLUMNS: Final = tuple(
    field.name
    for field in SCHEMA
    if not pa.types.is_list(field.type) and field.name not in ("text", "metadata")
)

LIST_COLUMNS: Final = tuple(field.name for field in SCHEMA if pa.types.is_list(field.type))


def other_version(version: int) -> str:
    """Say what to do with data of another format version."""
    what = "install a newer rollout" if version > FORMAT_VERSION else "generate it again"
    return f"format version {version}, expected {FORMAT_VERSION}: {what}"
