"""What stands between the traffic and the replicas."""
