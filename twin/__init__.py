"""Digital twin of LLM serving with vLLM on Kubernetes."""
