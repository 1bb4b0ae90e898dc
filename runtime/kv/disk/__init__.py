"""Blocks on disk: one checksummed file each, in a folder with a size limit that processes share."""
