"""The real backend: actual weights, copies and kernels behind the simulator's own policies."""
