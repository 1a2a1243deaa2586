"""The schema against the contract, written out a second time."""

import pyarrow as pa

from rollout.schema.columns import LIST_COLUMNS, SCALAR_COLUMNS, SCHEMA

# the format's contract, written out a second time: a change here is a new format version
CONTRACT = """
rollout_id string
group_id string
prompt_id string
sample_index int32
group_size int32
prompt_token_ids list<int32>
token_ids list<int32>
text string null
sampled_logprobs list<float>
temperature float
policy_step int64 null
support_kind string
support_offsets list<int64> null
support_entries list<uint64> null
tail_mass list<float> null
draw_entries list<uint64> null
finish_reason string null
stop_reason string null
num_prompt_tokens int32
num_tokens int32
num_support_entries int64
reward float null
advantage float null
metadata string null
"""


def test_schema_is_the_contract() -> None:
    lines = []
    for field in SCHEMA:
        kind = str(field.type)
        if pa.types.is_list(field.type):
            assert field.type.value_field.name == "element"
            assert not field.type.value_field.nullable
            kind = f"list<{field.type.value_type}>"
        lines.append(f"{field.name} {kind}{' null' if field.nullable else ''}")
    assert lines == CONTRACT.split("\n")[1:-1]


def test_every_column_has_a_unit_and_a_meaning() -> None:
    for field in SCHEMA:
        assert set(field.metadata) == {b"unit", b"meaning"}
        assert all(field.metadata.values())
    assert SCHEMA.metadata is None


def test_statistics_are_kept_for_short_scalars_only() -> None:
    assert set(SCALAR_COLUMNS) | set(LIST_COLUMNS) | {"text", "metadata"} == set(SCHEMA.names)
    assert not set(SCALAR_COLUMNS) & set(LIST_COLUMNS)
    assert {"num_tokens", "num_support_entries", "sample_index"} <= set(SCALAR_COLUMNS)
