"""Stand-ins for devices, libraries and executors that tests share, and the tests that hold them to the originals."""
