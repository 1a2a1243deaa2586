"""Write docs/job-file.md from the models of the job file, so that the two can't disagree.

python jobs/docs/job_file.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from rollout.config import JobConfig

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "job-file.md"
_HEAD: Final = """# The job file

Made by `python jobs/docs/job_file.py` from `rollout/config.py`; change the descriptions there.

A job is YAML with these sections. Unknown keys are refused, and so are `${NAME}`, NaN and
infinities; unset sampling values are neutral, whatever the model's generation_config.json says.
`--set sampling.top_p=0.9` overrides a value for one run, `--dry-run` resolves and checks everything
without loading weights.

```bash
rollout generate --config job.yaml --set output.path=out/other --dry-run
```
"""


def render() -> str:
    """Return the page's text."""
    schema = JobConfig.model_json_schema()
    sections = schema["$defs"]
    parts = [_HEAD]
    plain = {}
    for name, field in schema["properties"].items():
        reference = _reference(field)
        if reference is None:
            plain[name] = field
            continue
        section = sections[reference]
        parts.append(f"## {name}\n\n{section['description']}\n")
        parts.append(_table(section["properties"], section.get("required", [])))
    parts.append("## At the top level\n")
    parts.append(_table(plain, schema.get("required", [])))
    return "\n".join(parts)


def _reference(field: dict[str, Any]) -> str | None:
    found = field.get("$ref") or next((one["$ref"] for one in field.get("allOf", [])), None)
    return None if found is None else str(found).rpartition("/")[2]


def _table(fields: dict[str, Any], required: list[str]) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required" if name in required else f"`{json.dumps(field.get('default', {}))}`"
        meaning = " ".join(field.get("description", "").split()).replace("|", "\\|")
        lines.append(f"| {name} | {_type(field)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(_type(one) for one in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    name = {"integer": "integer", "number": "number", "object": "mapping", "string": "text"}.get(
        field.get("type", ""), field.get("type", "any")
    )
    if name == "array":
        return f"list of {_type(field.get('items', {}))}"
    limits = [
        f"{sign} {field[key]}"
        for key, sign in (
            ("minimum", ">="),
            ("exclusiveMinimum", ">"),
            ("maximum", "<="),
            ("exclusiveMaximum", "<"),
        )
        if key in field and abs(field[key]) < 2**31
    ]
    return " ".join([name, ", ".join(limits)]).strip()


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
