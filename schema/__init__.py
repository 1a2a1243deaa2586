"""The dataset's format, imported as `rollout.schema`; needs pyarrow and numpy only."""
