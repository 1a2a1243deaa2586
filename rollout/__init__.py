"""Rollouts as a dataset: exact sampling supports from vLLM, replayed with no engine running."""

from rollout.version import VERSION as __version__

__all__ = ["__version__"]
