"""vLLM's own scheduler beside ours, step by step, on the same random workloads."""
