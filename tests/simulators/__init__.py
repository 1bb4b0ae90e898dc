"""Stand-ins for devices, libraries and executors that tests share."""
