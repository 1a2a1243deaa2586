"""The name under which the driver hands the capture's settings to the workers."""

CONFIG_KEY = (
    "rollout_capture"  # in the engine's additional_config; vLLM hashes it: nothing of one run
)
