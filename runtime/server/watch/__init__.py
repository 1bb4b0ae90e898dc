"""What others see of a server: metrics for Prometheus, a log of requests, traces."""
