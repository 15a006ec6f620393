"""What is wrong with manifests that serve LLMs, beyond what a schema sees: each rule is a fault of real incidents."""
