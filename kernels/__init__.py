"""GPU kernels with their references, imported as `rollout.kernels`; needs torch and triton only."""
