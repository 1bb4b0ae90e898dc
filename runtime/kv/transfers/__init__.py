"""Moving blocks between the device, host memory and disk: the copies, and which are saved, restored and flushed.

Which block has which content, and what is evicted, belongs in the parent folder.
"""
