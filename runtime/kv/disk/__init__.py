"""Blocks on disk: checksummed slots of larger files, in a folder with a size limit that processes share."""
