"""Arrow schemas of the tables beside the data: the plan, and what was set aside."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

PLAN_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field(
            "prompt_key", pa.string(), nullable=False, metadata={"meaning": "our key of the prompt"}
        ),
        pa.field(
            "prompt_id", pa.string(), nullable=False, metadata={"meaning": "the user's own id"}
        ),
        pa.field(
            "unit",
            pa.string(),
            nullable=False,
            metadata={"meaning": "the slice of the prompts that it is committed with"},
        ),
    ]
)

REJECTED_SCHEMA: Final[pa.Schema] = pa.schema(
    [
        pa.field(
            "prompt_key", pa.string(), nullable=False, metadata={"meaning": "our key of the prompt"}
        ),
        pa.field("prompt_id", pa.string(), metadata={"meaning": "the user's own id, if readable"}),
        pa.field(
            "sample_index",
            pa.int32(),
            metadata={"meaning": "the rollout set aside; null for the whole prompt"},
        ),
        pa.field("file", pa.string(), nullable=False, metadata={"meaning": "the prompt's file"}),
        pa.field("line", pa.int64(), metadata={"meaning": "its line or row in the file, from 1"}),
        pa.field(
            "stage",
            pa.string(),
            nullable=False,
            metadata={"meaning": "read, render, sample, capture or reward"},
        ),
        pa.field("reason", pa.string(), nullable=False, metadata={"meaning": "a snake_case code"}),
        pa.field("detail", pa.string(), nullable=False, metadata={"meaning": "for people"}),
        pa.field(
            "num_prompt_tokens", pa.int32(), metadata={"meaning": "prompt length, where known"}
        ),
    ]
)
