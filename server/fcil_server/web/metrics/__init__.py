"""The Prometheus endpoint and the health check."""
